// Record queue of the module.
#ifndef HYBRIDKV_BINDINGS_RECORD_QUEUE_BINDING_H_
#define HYBRIDKV_BINDINGS_RECORD_QUEUE_BINDING_H_

#include <nanobind/nanobind.h>

namespace hybridkv::bindings {

void bind_record_queue(nanobind::module_& module);

}  // namespace hybridkv::bindings

#endif  // HYBRIDKV_BINDINGS_RECORD_QUEUE_BINDING_H_
