// Lowering of the module.
#ifndef HYBRIDKV_BINDINGS_LOWERING_BINDING_H_
#define HYBRIDKV_BINDINGS_LOWERING_BINDING_H_

#include <nanobind/nanobind.h>

namespace hybridkv::bindings {

void bind_lowering(nanobind::module_& module);

}  // namespace hybridkv::bindings

#endif  // HYBRIDKV_BINDINGS_LOWERING_BINDING_H_
