// The arena for Python: functions of the module _C, and its exception ArenaError.
#pragma once

#include <Python.h>

namespace inflight {

// Adds them; -1 and a Python error if that fails.
int add_arena(PyObject* module);

}  // namespace inflight
