"""Formulas of the simulator: step time, hardware, calibration, the allocator, published figures."""
