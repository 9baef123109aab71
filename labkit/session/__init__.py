"""Inside a rank: the session, and what it measures. Rank programs import it as labkit.rank."""
