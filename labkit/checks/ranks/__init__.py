"""What runs inside ranks when an answer is judged: ``answers`` is the program, beside it what each
lab feeds.
"""
