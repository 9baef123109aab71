"""What runs inside a rank: the session and its measurements. Rank programs import it as
labkit.rank.
"""
