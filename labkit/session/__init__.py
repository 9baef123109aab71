"""What runs inside a rank. Rank programs import it as labkit.rank."""
