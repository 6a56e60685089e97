// Exports only: an arena is a capsule, and its calls are functions that take it.
// Torch's pluggable allocator calls the two C functions at the end.
#include "arena_binding.h"

#include <sys/types.h>

#include <exception>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

#include "arena.h"
#include "arenas.h"
#include "cuda_memory.h"
#include "host_memory.h"

namespace inflight {
namespace {

constexpr const char* kCapsule = "vllm.inflight.arena";
constexpr const char* kFaultKinds[] = {"failed", "out_of_memory", "torn"};

PyObject* arena_error = nullptr;

struct Opened {
  int device;
  std::shared_ptr<Arena> arena;
};

// Runs `work`, which returns a new reference; an exception becomes a Python error.
template <class Work>
PyObject* translated(Work work) {
  try {
    return work();
  } catch (const Fault& why) {
    PyObject* facts = Py_BuildValue("(sssLK)", why.what(), kFaultKinds[why.kind],
                                    why.call.c_str(), static_cast<long long>(why.code),
                                    static_cast<unsigned long long>(why.missing));
    if (facts != nullptr) PyErr_SetObject(arena_error, facts);
    Py_XDECREF(facts);
  } catch (const std::out_of_range& why) {
    PyErr_SetString(PyExc_ValueError, why.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& why) {
    PyErr_SetString(PyExc_RuntimeError, why.what());
  }
  return nullptr;
}

Opened* opened(PyObject* capsule) {
  return static_cast<Opened*>(PyCapsule_GetPointer(capsule, kCapsule));
}

void collect(PyObject* capsule) { delete opened(capsule); }

// (arena) -> result of `work(arena)`
template <class Work>
PyObject* call(PyObject* capsule, Work work) {
  const Opened* own = opened(capsule);
  if (own == nullptr) return nullptr;
  const std::shared_ptr<Arena> arena = own->arena;
  return translated([&] { return work(*arena); });
}

// The same without the interpreter's lock, for long calls; returns None.
template <class Work>
PyObject* call_long(PyObject* capsule, Work work) {
  return call(capsule, [&](Arena& arena) {
    std::exception_ptr failure;
    PyThreadState* state = PyEval_SaveThread();
    try {
      work(arena);
    } catch (...) {
      failure = std::current_exception();
    }
    // Not in a destructor: if the process is about to end, taking the lock back ends
    // this thread by unwinding its stack.
    PyEval_RestoreThread(state);
    if (failure) std::rethrow_exception(failure);
    Py_RETURN_NONE;
  });
}

PyObject* open(PyObject*, PyObject* args) {
  int device;  // negative: host memory; -1: the next free number
  unsigned long long reserve_bytes;
  if (!PyArg_ParseTuple(args, "iK", &device, &reserve_bytes)) return nullptr;
  return translated([&] {
    Arenas& arenas = Arenas::of_process();
    if (device == -1) device = arenas.next_host();
    auto own = std::make_unique<Opened>();
    own->device = device;
    std::unique_ptr<Memory> memory = std::make_unique<HostMemory>();
    if (device >= 0) memory = std::make_unique<CudaMemory>(device);
    own->arena = std::make_shared<Arena>(std::move(memory), reserve_bytes);
    arenas.enter(device, own->arena);
    PyObject* capsule = PyCapsule_New(own.get(), kCapsule, collect);
    if (capsule != nullptr) own.release();
    return capsule;
  });
}

PyObject* fill(PyObject*, PyObject* capsule) {
  return call(capsule, [&](Arena& arena) {
    Arenas::of_process().fill(opened(capsule)->device, &arena);
    Py_RETURN_NONE;
  });
}

PyObject* allocate(PyObject*, PyObject* args) {
  PyObject* capsule;
  unsigned long long bytes;
  if (!PyArg_ParseTuple(args, "OK", &capsule, &bytes)) return nullptr;
  return call(capsule, [&](Arena& arena) {
    return PyLong_FromUnsignedLongLong(arena.allocate(bytes));
  });
}

PyObject* free(PyObject*, PyObject* args) {
  PyObject* capsule;
  unsigned long long address;
  if (!PyArg_ParseTuple(args, "OK", &capsule, &address)) return nullptr;
  return call_long(capsule, [&](Arena& arena) { arena.free(address); });
}

PyObject* drop(PyObject*, PyObject* args) {
  PyObject* capsule;
  unsigned long long address;
  if (!PyArg_ParseTuple(args, "OK", &capsule, &address)) return nullptr;
  return call_long(capsule, [&](Arena& arena) { arena.drop(address); });
}

template <void (Arena::*work)()>
PyObject* step(PyObject*, PyObject* capsule) {
  return call_long(capsule, [](Arena& arena) { (arena.*work)(); });
}

PyObject* flip(PyObject*, PyObject* capsule) {
  // Keeps the interpreter's lock: taking it back could take longer than the flip.
  return call(capsule, [](Arena& arena) { return PyFloat_FromDouble(arena.flip()); });
}

PyObject* close(PyObject*, PyObject* capsule) {
  const Opened* own = opened(capsule);
  if (own == nullptr) return nullptr;
  return call_long(capsule, [&](Arena& arena) {
    Arenas::of_process().forget(own->device, &arena);
    arena.close();
  });
}

PyObject* shadow_address(PyObject*, PyObject* args) {
  PyObject* capsule;
  unsigned long long address, bytes;
  if (!PyArg_ParseTuple(args, "OKK", &capsule, &address, &bytes)) return nullptr;
  return call(capsule, [&](Arena& arena) {
    const Arena::ShadowAddress found = arena.shadow_address(address, bytes);
    return Py_BuildValue("(KKK)", found.run, found.run_bytes, found.offset);
  });
}

PyObject* contains(PyObject*, PyObject* args) {
  PyObject* capsule;
  unsigned long long address, bytes;
  if (!PyArg_ParseTuple(args, "OKK", &capsule, &address, &bytes)) return nullptr;
  return call(capsule, [&](Arena& arena) {
    return PyBool_FromLong(arena.contains(address, bytes));
  });
}

PyObject* runs(PyObject*, PyObject* capsule) {
  return call(capsule, [](Arena& arena) {
    PyObject* list = PyList_New(0);
    for (const Run& run : arena.runs()) {
      PyObject* pair = list ? Py_BuildValue("(KK)", run.offset, run.bytes) : nullptr;
      if (pair == nullptr || PyList_Append(list, pair) != 0) Py_CLEAR(list);
      Py_XDECREF(pair);
    }
    return list;
  });
}

PyObject* stats(PyObject*, PyObject* capsule) {
  const Opened* own = opened(capsule);
  if (own == nullptr) return nullptr;
  return call(capsule, [&](Arena& arena) {
    const Arena::Stats now = arena.stats();
    return Py_BuildValue(
        "{s:i,s:s,s:N,s:K,s:K,s:K,s:K,s:K,s:K,s:s}", "device", own->device, "phase",
        kPhaseNames[int(now.phase)], "settled", PyBool_FromLong(now.settled), "base",
        now.base, "live_bytes", now.live_bytes, "backed_bytes", now.backed_bytes,
        "wasted_bytes", now.wasted_bytes, "num_handles", now.num_handles,
        "num_segments", now.num_segments, "last_error",
        Arenas::of_process().last_error(own->device).c_str());
  });
}

PyObject* host_limits(PyObject*, PyObject* args) {
  PyObject* capsule;
  unsigned long long budget, skip, times;
  const char* name;
  if (!PyArg_ParseTuple(args, "OKsKK", &capsule, &budget, &name, &skip, &times))
    return nullptr;
  return call(capsule, [&](Arena& arena) {
    auto* memory = dynamic_cast<HostMemory*>(&arena.memory());
    if (memory == nullptr)
      throw std::logic_error("only an arena in host memory has limits");
    memory->set_budget(budget);
    memory->inject(name, skip, times);
    Py_RETURN_NONE;
  });
}

PyMethodDef methods[] = {
    {"arena_open", open, METH_VARARGS,
     "arena_open(device, reserve_bytes) -> arena; device -1 opens one in host memory, "
     "and the device number of such an arena opens another one beside it"},
    {"arena_fill", fill, METH_O,
     "arena_fill(arena): torch allocates in this arena from now on"},
    {"arena_allocate", allocate, METH_VARARGS,
     "arena_allocate(arena, bytes) -> address of a new segment"},
    {"arena_free", free, METH_VARARGS, "arena_free(arena, address): free a segment"},
    {"arena_drop", drop, METH_VARARGS,
     "arena_drop(arena, address): release a segment its allocator keeps unused"},
    {"arena_consolidate", step<&Arena::consolidate>, METH_O,
     "arena_consolidate(arena): few large handles at the same addresses"},
    {"arena_pair", step<&Arena::pair>, METH_O,
     "arena_pair(arena): add shadow memory with the same bytes"},
    {"arena_unpair", step<&Arena::unpair>, METH_O,
     "arena_unpair(arena): release the shadow memory; addresses stay reserved"},
    {"arena_suspend", step<&Arena::suspend>, METH_O,
     "arena_suspend(arena): release the live memory; addresses stay reserved"},
    {"arena_resume", step<&Arena::resume>, METH_O,
     "arena_resume(arena): map memory at the live addresses again"},
    {"arena_flip", flip, METH_O,
     "arena_flip(arena) -> seconds; map the shadow memory at the live addresses"},
    {"arena_settle", step<&Arena::settle>, METH_O,
     "arena_settle(arena): map the memory that is not live at the second range"},
    {"arena_shadow_address", shadow_address, METH_VARARGS,
     "arena_shadow_address(arena, address, bytes) -> (address of the run in the second "
     "range, its bytes, offset in it)"},
    {"arena_contains", contains, METH_VARARGS,
     "arena_contains(arena, address, bytes) -> whether one handle has all of them"},
    {"arena_runs", runs, METH_O, "arena_runs(arena) -> [(offset, bytes)]"},
    {"arena_stats", stats, METH_O, "arena_stats(arena) -> values by name"},
    {"arena_close", close, METH_O, "arena_close(arena): release everything"},
    {"arena_host_limits", host_limits, METH_VARARGS,
     "arena_host_limits(arena, budget_bytes, call, skip, times): after `skip` more "
     "calls of that name, or of any if it is '', the next `times` fail (tests)"},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

int add_arena(PyObject* module) {
  if (arena_error == nullptr)
    arena_error =
        PyErr_NewException("vllm.inflight._C.ArenaError", PyExc_RuntimeError, nullptr);
  if (arena_error == nullptr) return -1;
  Py_INCREF(arena_error);
  if (PyModule_AddObject(module, "ArenaError", arena_error) != 0) {
    Py_DECREF(arena_error);
    return -1;
  }
  return PyModule_AddFunctions(module, methods);
}

}  // namespace inflight

#define INFLIGHT_EXPORT extern "C" __attribute__((visibility("default")))

// Torch calls these from any thread, with or without the interpreter's lock. So they
// use nothing of Python, and report a failure as nullptr.
INFLIGHT_EXPORT void* inflight_arena_malloc(ssize_t size, int device, void*) {
  using inflight::Arenas;
  try {
    // Of several arenas, the last one is being filled.
    const auto arenas = Arenas::of_process().of_device(device);
    if (arenas.empty() || size < 0) return nullptr;
    return reinterpret_cast<void*>(arenas.back()->allocate(uint64_t(size)));
  } catch (const std::exception& why) {
    Arenas::of_process().set_last_error(device, why.what());
    return nullptr;
  }
}

INFLIGHT_EXPORT void inflight_arena_free(void* pointer, ssize_t, int device, void*) {
  using inflight::Arenas;
  try {
    // Each arena knows its own pointers.
    for (const auto& arena : Arenas::of_process().of_device(device))
      arena->free(reinterpret_cast<uint64_t>(pointer));
  } catch (const std::exception& why) {
    Arenas::of_process().set_last_error(device, why.what());
  }
}
