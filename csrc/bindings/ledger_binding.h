// Ledgers of the module.
#ifndef HYBRIDKV_BINDINGS_LEDGER_BINDING_H_
#define HYBRIDKV_BINDINGS_LEDGER_BINDING_H_

#include <nanobind/nanobind.h>

namespace hybridkv::bindings {

void bind_ledger(nanobind::module_& module);
void bind_record_ledger(nanobind::module_& module);

}  // namespace hybridkv::bindings

#endif  // HYBRIDKV_BINDINGS_LEDGER_BINDING_H_
