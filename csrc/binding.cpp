// Exports only: blocks and sums are passed as packed u64.
#include <Python.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "arena_binding.h"
#include "delta_binding.h"
#include "digest.h"
#include "nonfinite.h"
#include "parallel.h"

namespace {

using namespace inflight;
using Atomics = std::atomic<uint64_t>;

const unsigned char* at(const Block& block, uint64_t row, uint64_t byte) {
  return reinterpret_cast<const unsigned char*>(
      uintptr_t(block.data + row * block.row_stride + byte));
}

void digest_piece(const Piece& piece, Atomics* out) {
  const Block& block = *piece.block;
  Sums sums;
  for (uint64_t row = piece.row; row < piece.row + piece.num_rows; ++row)
    digest_run(at(block, row, piece.first_byte), piece.num_bytes,
               block.x + row * block.y + piece.first_byte, sums);
  out[2 * block.owner].fetch_add(sums.a, std::memory_order_relaxed);
  out[2 * block.owner + 1].fetch_add(sums.b, std::memory_order_relaxed);
}

void nonfinite_piece(const Piece& piece, Atomics* out) {
  const Block& block = *piece.block;
  uint64_t count = 0;
  for (uint64_t row = piece.row; row < piece.row + piece.num_rows; ++row)
    count += nonfinite_run(at(block, row, piece.first_byte), piece.num_bytes, block.x,
                           block.y);
  out[block.owner].fetch_add(count, std::memory_order_relaxed);
}

// (blocks: bytes, num_owners: int, num_threads: int) -> bytes
PyObject* run(PyObject* args, uint64_t per_owner,
              void (*work)(const Piece&, Atomics*)) {
  char* packed;
  Py_ssize_t size;
  PyObject* blocks;
  unsigned long long num_owners, num_threads;
  if (!PyArg_ParseTuple(args, "SKK", &blocks, &num_owners, &num_threads))
    return nullptr;
  if (PyBytes_AsStringAndSize(blocks, &packed, &size) != 0) return nullptr;
  if (size_t(size) % sizeof(Block) != 0) {
    PyErr_SetString(PyExc_ValueError, "blocks must be packed as 7 u64 each");
    return nullptr;
  }
  try {
    std::vector<Block> own(size_t(size) / sizeof(Block));
    if (size != 0) std::memcpy(own.data(), packed, size_t(size));
    for (const Block& block : own)
      if (block.owner >= num_owners) {
        PyErr_SetString(PyExc_ValueError, "a block's owner is out of range");
        return nullptr;
      }
    const size_t num_sums = size_t(num_owners * per_owner);
    const std::unique_ptr<Atomics[]> out(new Atomics[num_sums]());
    const std::vector<Piece> pieces = cut(own.data(), own.size());
    PyThreadState* gil = PyEval_SaveThread();
    share_out(pieces.size(), num_threads,
              [&](uint64_t i) { work(pieces[i], out.get()); });
    PyEval_RestoreThread(gil);
    std::vector<uint64_t> sums(num_sums);
    for (size_t i = 0; i < num_sums; ++i) sums[i] = out[i].load();
    return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(sums.data()),
                                     Py_ssize_t(num_sums * sizeof(uint64_t)));
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

PyObject* digest(PyObject*, PyObject* args) { return run(args, 2, digest_piece); }
PyObject* nonfinite(PyObject*, PyObject* args) { return run(args, 1, nonfinite_piece); }

constexpr uint64_t kPieceChanges = uint64_t(1) << 15;

// (places, old_bits, new_bits, num, width, num_threads) -> two u64; addresses first
PyObject* digest_of_changes(PyObject*, PyObject* args) {
  unsigned long long places, old_bits, new_bits, num, width, num_threads;
  if (!PyArg_ParseTuple(args, "KKKKKK", &places, &old_bits, &new_bits, &num, &width,
                        &num_threads))
    return nullptr;
  const auto digest = width == 1   ? digest_changes<uint8_t>
                      : width == 2 ? digest_changes<uint16_t>
                      : width == 4 ? digest_changes<uint32_t>
                      : width == 8 ? digest_changes<uint64_t>
                                   : nullptr;
  if (digest == nullptr)
    return PyErr_Format(PyExc_ValueError, "an element of %llu bytes", width);
  Atomics a{0}, b{0};
  PyThreadState* gil = PyEval_SaveThread();
  share_out((num + kPieceChanges - 1) / kPieceChanges, num_threads, [&](uint64_t i) {
    const uint64_t first = i * kPieceChanges;
    Sums sums;
    digest(reinterpret_cast<const int64_t*>(uintptr_t(places)) + first,
           reinterpret_cast<const unsigned char*>(uintptr_t(old_bits)) + first * width,
           reinterpret_cast<const unsigned char*>(uintptr_t(new_bits)) + first * width,
           std::min<uint64_t>(kPieceChanges, num - first), sums);
    a.fetch_add(sums.a, std::memory_order_relaxed);
    b.fetch_add(sums.b, std::memory_order_relaxed);
  });
  PyEval_RestoreThread(gil);
  return Py_BuildValue("KK", static_cast<unsigned long long>(a.load()),
                       static_cast<unsigned long long>(b.load()));
}

PyObject* kernel_names(PyObject*, PyObject*) {
  PyObject* names = PyList_New(0);
  for (const Kernel& kernel : kernels()) {
    PyObject* name = names ? PyUnicode_FromString(kernel.name) : nullptr;
    if (name == nullptr || PyList_Append(names, name) != 0) Py_CLEAR(names);
    Py_XDECREF(name);
  }
  return names;
}

PyObject* use_kernel(PyObject*, PyObject* args) {
  PyObject* wanted;
  if (!PyArg_ParseTuple(args, "U", &wanted)) return nullptr;
  for (const Kernel& kernel : kernels())
    if (PyUnicode_CompareWithASCIIString(wanted, kernel.name) == 0) {
      chunks_in_use.store(kernel.chunks);
      Py_RETURN_NONE;
    }
  return PyErr_Format(PyExc_ValueError, "no kernel %R on this processor", wanted);
}

PyMethodDef methods[] = {
    {"digest", digest, METH_VARARGS,
     "digest(blocks, num_owners, num_threads) -> two u64 for every owner"},
    {"nonfinite", nonfinite, METH_VARARGS,
     "nonfinite(blocks, num_owners, num_threads) -> one u64 for every owner"},
    {"digest_of_changes", digest_of_changes, METH_VARARGS,
     "digest_of_changes(places, old_bits, new_bits, num, width, num_threads) -> two "
     "u64"},
    {"kernels", kernel_names, METH_NOARGS,
     "kernels() -> names of the digest kernels this processor can run, fastest first"},
    {"use_kernel", use_kernel, METH_VARARGS,
     "use_kernel(name): run this digest kernel from now on (the fastest is default)"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    "_C",
    "Native core of vllm.inflight; call it through vllm.inflight.ops.",
    0,
    methods,
    nullptr,
    nullptr,
    nullptr,
    nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__C() {
  PyObject* created = PyModule_Create(&module);
  if (created != nullptr && (add_arena(created) != 0 || add_delta(created) != 0))
    Py_CLEAR(created);
  return created;
}
