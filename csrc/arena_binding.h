// The arena for Python: functions of the module _C, and its exception ArenaError.
#pragma once

#include <Python.h>

namespace inflight {

// Adds the functions; on failure returns -1 and sets a Python error.
int add_arena(PyObject* module);

}  // namespace inflight
