"""The rank programs, one a lab. Each runs under labkit.run and under bare torchrun."""
