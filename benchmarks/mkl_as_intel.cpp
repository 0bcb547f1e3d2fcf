// Put before libtorch (LD_PRELOAD), this has MKL take the code it keeps for Intel's processors on any other: MKL asks
// the function of this name which it is on. For benchmarks/end_to_end.py, that torch is measured at its fastest too.
extern "C" int mkl_serv_intel_cpu_true() { return 1; }
