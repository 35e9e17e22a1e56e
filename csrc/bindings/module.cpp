// mgrpo._C: importing it loads the library, which registers the ops. Its functions only return how it was built and
// which settings of the policy loss its ops take.
#include <pybind11/pybind11.h>
#include <torch/headeronly/version.h>

#include "core/policy_loss.h"

#ifndef MGRPO_CUDA_ARCHS
#define MGRPO_CUDA_ARCHS ""
#endif

PYBIND11_MODULE(_C, m) {
  m.def("build_info", [] {
    pybind11::dict info;
    info["cuda_archs"] = MGRPO_CUDA_ARCHS;
    info["built_with_torch"] = TORCH_VERSION;
    return info;
  });
  m.def("loss_settings", [] {
    pybind11::list names;
    for (const char* name : mgrpo::kSettingNames) names.append(name);
    return names;
  });
}
