// Deltas for Python: functions of the module _C.
#pragma once

#include <Python.h>

namespace inflight {

// Adds the functions; on failure returns -1 and sets a Python error.
int add_delta(PyObject* module);

}  // namespace inflight
