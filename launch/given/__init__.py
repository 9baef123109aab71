"""What lab 6 gives to the learner: a training program that nobody has explained."""

from pathlib import Path

TRAIN = Path(__file__).with_name("train.py")
