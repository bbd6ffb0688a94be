// The Python side of bertfast._C: build_info() only. Kernels reach Python through the dispatcher; every source file
// registers its own, and the schemas are defined in Python, so that a missing _C removes no name.
#include <pybind11/pybind11.h>
#include <torch/headeronly/version.h>

#define BERTFAST_STRINGIZE_(x) #x
#define BERTFAST_STRINGIZE(x) BERTFAST_STRINGIZE_(x)

namespace py = pybind11;

static py::dict build_info() {
  py::dict info;
  info["torch"] = BERTFAST_STRINGIZE(TORCH_VERSION_MAJOR) "." BERTFAST_STRINGIZE(TORCH_VERSION_MINOR);
  info["python"] = PY_VERSION;
  info["compiler"] = __VERSION__;
#ifdef USE_CUDA
  info["backends"] = py::make_tuple("cpu", "cuda");
#else
  info["backends"] = py::make_tuple("cpu");
#endif
  return info;
}

PYBIND11_MODULE(_C, m) {
  m.def("build_info", &build_info, "What this extension was compiled with and for.");
}
