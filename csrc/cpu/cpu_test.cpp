// The kernels of one instruction set, one by one, for tests/test_isa.py.
