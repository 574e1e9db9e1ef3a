"""int8 nets: scales from calibration data, the choice of layers, and the loss of accuracy."""
