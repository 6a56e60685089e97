// Exports only: addresses are passed as u64, and blocks that wait for their part are a
// capsule. The work is done without the interpreter's lock.
#include "delta_binding.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <new>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "delta.h"
#include "delta_encode.h"
#include "parallel.h"
#include "swap.h"

namespace inflight {
namespace {

using namespace delta;
using U64 = unsigned long long;

constexpr const char* kCapsule = "vllm.inflight.delta";
constexpr uint64_t kPieceElements = uint64_t(1) << 20;

struct Waiting {
  std::mutex mutex;
  Pending blocks;
  Scratches scratches;
};

template <class T>
T* pointer(U64 address) {
  return reinterpret_cast<T*>(uintptr_t(address));
}

// Runs `work` without the interpreter's lock. False: a Python error is set.
template <class Work>
bool unlocked(Work work) {
  std::exception_ptr failure;
  PyThreadState* state = PyEval_SaveThread();
  try {
    work();
  } catch (...) {
    failure = std::current_exception();
  }
  PyEval_RestoreThread(state);
  if (!failure) return true;
  try {
    std::rethrow_exception(failure);
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& why) {
    PyErr_SetString(PyExc_ValueError, why.what());
  }
  return false;
}

// As share_out, for work that throws: the first failure in order is thrown on.
template <class Work>
void share_out_checked(uint64_t count, uint64_t num_threads, const Work& work) {
  std::mutex mutex;
  uint64_t first = count;
  std::exception_ptr failure;
  share_out(count, num_threads, [&](uint64_t i) {
    try {
      work(i);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex);
      if (i > first) return;
      first = i;
      failure = std::current_exception();
    }
  });
  if (failure) std::rethrow_exception(failure);
}

// Calls work(T()) with the unsigned type of that width.
template <class Work>
auto by_width(uint64_t width, const Work& work) {
  switch (width) {
    case 1:
      return work(uint8_t());
    case 2:
      return work(uint16_t());
    case 4:
      return work(uint32_t());
    case 8:
      return work(uint64_t());
    default:
      throw std::invalid_argument("an element has 1, 2, 4 or 8 bytes");
  }
}

Waiting* waiting(PyObject* capsule) {
  return static_cast<Waiting*>(PyCapsule_GetPointer(capsule, kCapsule));
}

void collect(PyObject* capsule) { delete waiting(capsule); }

PyObject* open(PyObject*, PyObject*) {
  Waiting* own = new (std::nothrow) Waiting;
  if (own == nullptr) return PyErr_NoMemory();
  PyObject* capsule = PyCapsule_New(own, kCapsule, collect);
  if (capsule == nullptr) delete own;
  return capsule;
}

// Encodes blocks by encode(i), and lets them wait in order; returns the bytes waiting.
template <class Encode>
PyObject* encode_blocks(Waiting* own, uint64_t num_blocks, uint64_t num_threads,
                        const Encode& encode) {
  uint64_t bytes = 0;
  const bool done = unlocked([&] {
    const std::lock_guard<std::mutex> lock(own->mutex);
    std::vector<std::optional<Encoded>> blocks(num_blocks);
    share_out_checked(num_blocks, num_threads,
                      [&](uint64_t i) { blocks[i] = encode(i); });
    for (std::optional<Encoded>& block : blocks)
      if (block) own->blocks.add(std::move(*block));
    bytes = own->blocks.bytes();
  });
  return done ? PyLong_FromUnsignedLongLong(bytes) : nullptr;
}

PyObject* encode(PyObject*, PyObject* args) {
  PyObject* capsule;
  U64 tensor, start, old_data, new_data, num, width, per_block, choice, num_threads;
  if (!PyArg_ParseTuple(args, "OKKKKKKKKK", &capsule, &tensor, &start, &old_data,
                        &new_data, &num, &width, &per_block, &choice, &num_threads))
    return nullptr;
  Waiting* own = waiting(capsule);
  if (own == nullptr) return nullptr;
  if (per_block == 0 || per_block > kMaxElements) {
    PyErr_SetString(PyExc_ValueError, "a block has 1 to 4194304 elements");
    return nullptr;
  }
  const uint64_t num_blocks = num / per_block + (num % per_block != 0);
  return encode_blocks(own, num_blocks, num_threads, [=](uint64_t i) {
    const uint64_t first = i * per_block;
    const uint32_t count = uint32_t(std::min<uint64_t>(per_block, num - first));
    return own->scratches.lend([&](Scratch& scratch) {
      return by_width(width, [&](auto type) {
        return encode_block<decltype(type)>(
            uint32_t(tensor), start + first,
            pointer<const unsigned char>(old_data) + first * width,
            pointer<const unsigned char>(new_data) + first * width, count,
            Choice(choice), scratch);
      });
    });
  });
}

// The ranges of `positions` that lie in one block each.
std::vector<std::pair<uint64_t, uint64_t>> ranges_of(const int64_t* positions,
                                                     uint64_t num, uint64_t per_block) {
  std::vector<std::pair<uint64_t, uint64_t>> ranges;
  for (uint64_t first = 0; first < num;) {
    if (positions[first] < 0) throw std::invalid_argument("a position is negative");
    const uint64_t end = (uint64_t(positions[first]) / per_block + 1) * per_block;
    uint64_t last = first;
    while (++last < num && uint64_t(positions[last]) < end)
      if (positions[last] <= positions[last - 1])
        throw std::invalid_argument("positions must strictly increase");
    if (last < num && positions[last] <= positions[last - 1])
      throw std::invalid_argument("positions must strictly increase");
    ranges.emplace_back(first, last);
    first = last;
  }
  return ranges;
}

PyObject* encode_places(PyObject*, PyObject* args) {
  PyObject* capsule;
  U64 tensor, places, old_bits, new_bits, num, width, per_block, choice, num_threads;
  if (!PyArg_ParseTuple(args, "OKKKKKKKKK", &capsule, &tensor, &places, &old_bits,
                        &new_bits, &num, &width, &per_block, &choice, &num_threads))
    return nullptr;
  Waiting* own = waiting(capsule);
  if (own == nullptr) return nullptr;
  if (per_block == 0 || per_block > kMaxElements) {
    PyErr_SetString(PyExc_ValueError, "a block has 1 to 4194304 elements");
    return nullptr;
  }
  const int64_t* positions = pointer<const int64_t>(places);
  std::vector<std::pair<uint64_t, uint64_t>> ranges;
  if (!unlocked([&] { ranges = ranges_of(positions, num, per_block); })) return nullptr;
  return encode_blocks(
      own, ranges.size(), num_threads, [&](uint64_t i) -> std::optional<Encoded> {
        const auto [first, last] = ranges[i];
        const uint64_t start = uint64_t(positions[first]) / per_block * per_block;
        std::vector<uint32_t> inside;
        for (uint64_t j = first; j < last; ++j)
          inside.push_back(uint32_t(uint64_t(positions[j]) - start));
        return by_width(width, [&](auto type) -> Encoded {
          using T = decltype(type);
          return BlockEncoder<T>(inside.data(), pointer<const T>(old_bits) + first,
                                 pointer<const T>(new_bits) + first,
                                 uint32_t(inside.size()))
              .encode(uint32_t(tensor), start, Choice(choice));
        });
      });
}

PyObject* first_part(PyObject*, PyObject* args) {
  PyObject* capsule;
  U64 limit;
  if (!PyArg_ParseTuple(args, "OK", &capsule, &limit)) return nullptr;
  Waiting* own = waiting(capsule);
  if (own == nullptr) return nullptr;
  std::pair<uint64_t, uint64_t> part;
  if (!unlocked([&] {
        const std::lock_guard<std::mutex> lock(own->mutex);
        part = own->blocks.first(limit);
      }))
    return nullptr;
  return Py_BuildValue("KK", U64(part.first), U64(part.second));
}

PyObject* take_part(PyObject*, PyObject* args) {
  PyObject* capsule;
  U64 num_rows, table, data;
  if (!PyArg_ParseTuple(args, "OKKK", &capsule, &num_rows, &table, &data))
    return nullptr;
  Waiting* own = waiting(capsule);
  if (own == nullptr) return nullptr;
  uint64_t bytes = 0;
  if (!unlocked([&] {
        const std::lock_guard<std::mutex> lock(own->mutex);
        own->blocks.take(num_rows, pointer<unsigned char>(table),
                         pointer<unsigned char>(data));
        bytes = own->blocks.bytes();
      }))
    return nullptr;
  return PyLong_FromUnsignedLongLong(bytes);
}

PyObject* count(PyObject*, PyObject* args) {
  U64 old_data, new_data, num, width, num_threads;
  if (!PyArg_ParseTuple(args, "KKKKK", &old_data, &new_data, &num, &width,
                        &num_threads))
    return nullptr;
  std::atomic<uint64_t> sum{0};
  if (!unlocked([&] {
        const uint64_t pieces = (num + kPieceElements - 1) / kPieceElements;
        share_out_checked(pieces, num_threads, [&](uint64_t i) {
          const uint64_t first = i * kPieceElements;
          sum += by_width(width, [&](auto type) {
            return count_changed<decltype(type)>(
                pointer<const unsigned char>(old_data) + first * width,
                pointer<const unsigned char>(new_data) + first * width,
                std::min<uint64_t>(kPieceElements, num - first));
          });
        });
      }))
    return nullptr;
  return PyLong_FromUnsignedLongLong(sum.load());
}

PyObject* check(PyObject*, PyObject* args) {
  U64 table, size, stored, counts, widths, num_tensors;
  if (!PyArg_ParseTuple(args, "KKKKKK", &table, &size, &stored, &counts, &widths,
                        &num_tensors))
    return nullptr;
  if (!unlocked([&] {
        check_table(pointer<const unsigned char>(table), size, stored,
                    pointer<const uint64_t>(counts),
                    pointer<const unsigned char>(widths), num_tensors);
      }))
    return nullptr;
  Py_RETURN_NONE;
}

// Where the entries of a row are written: the first place, and the byte of its bits.
struct Slot {
  uint64_t place, bits;
};

PyObject* decode(PyObject*, PyObject* args) {
  U64 table, num_rows, data, data_bytes, slots, places, num_places, bits, num_bits;
  U64 num_threads;
  if (!PyArg_ParseTuple(args, "KKKKKKKKKK", &table, &num_rows, &data, &data_bytes,
                        &slots, &places, &num_places, &bits, &num_bits, &num_threads))
    return nullptr;
  if (!unlocked([&] {
        share_out_checked(num_rows, num_threads, [&](uint64_t i) {
          const Row row = load<Row>(pointer<const unsigned char>(table) +
                                    sizeof(Header) + i * sizeof(Row));
          const Slot slot = pointer<const Slot>(slots)[i];
          check_bounds(row, i, data_bytes);
          const uint64_t size = uint64_t(row.num_entries) * row.width;
          if (slot.place > num_places || row.num_entries > num_places - slot.place ||
              slot.bits > num_bits || size > num_bits - slot.bits)
            throw std::invalid_argument("a row has no room for its entries");
          BlockDecoder(row, i, pointer<const unsigned char>(data))
              .decode(pointer<int64_t>(places) + slot.place,
                      pointer<unsigned char>(bits) + slot.bits);
        });
      }))
    return nullptr;
  Py_RETURN_NONE;
}

PyObject* apply_changes(PyObject*, PyObject* args) {
  U64 data, num_elements, places, bits, num, width, add, num_threads;
  if (!PyArg_ParseTuple(args, "KKKKKKKK", &data, &num_elements, &places, &bits, &num,
                        &width, &add, &num_threads))
    return nullptr;
  const int64_t* at = pointer<const int64_t>(places);
  if (!unlocked([&] {
        uint64_t last = 0;
        for (uint64_t i = 0; i < num; ++i) last = std::max(last, uint64_t(at[i]));
        if (num != 0 && last >= num_elements)
          throw std::invalid_argument("a place is beyond the tensor");
        const uint64_t pieces = (num + kPieceElements - 1) / kPieceElements;
        share_out_checked(pieces, num_threads, [&](uint64_t i) {
          const uint64_t first = i * kPieceElements;
          const uint64_t count = std::min<uint64_t>(kPieceElements, num - first);
          by_width(width, [&](auto type) {
            apply<decltype(type)>(pointer<unsigned char>(data), at + first,
                                  pointer<const unsigned char>(bits) + first * width,
                                  count, add != 0);
          });
        });
      }))
    return nullptr;
  Py_RETURN_NONE;
}

PyObject* swap_elements(PyObject*, PyObject* args) {
  U64 table, num_rows;
  if (!PyArg_ParseTuple(args, "KK", &table, &num_rows)) return nullptr;
  const Stretch* stretches = pointer<const Stretch>(table);
  Sums sums;
  if (!unlocked([&] {
        // All are checked before the first element is exchanged.
        for (uint64_t i = 0; i < num_rows; ++i) {
          by_width(stretches[i].width, [](auto) {});
          check_offsets(stretches[i]);
        }
        for (uint64_t i = 0; i < num_rows; ++i)
          by_width(stretches[i].width, [&](auto type) {
            swap_stretch<decltype(type)>(stretches[i], sums);
          });
      }))
    return nullptr;
  return Py_BuildValue("KK", U64(sums.a), U64(sums.b));
}

PyMethodDef methods[] = {
    {"delta_open", open, METH_NOARGS,
     "delta_open() -> a queue of blocks that wait for their part"},
    {"delta_encode", encode, METH_VARARGS,
     "delta_encode(queue, tensor, first element, old, new, num_elements, width, "
     "elements per block, values, num_threads) -> bytes that wait"},
    {"delta_encode_places", encode_places, METH_VARARGS,
     "delta_encode_places(queue, tensor, places, old bits, new bits, num, width, "
     "elements per block, values, num_threads) -> bytes that wait"},
    {"delta_first", first_part, METH_VARARGS,
     "delta_first(queue, limit) -> rows and bytes of data of the next part"},
    {"delta_take", take_part, METH_VARARGS,
     "delta_take(queue, num_rows, table, data) -> bytes that still wait"},
    {"delta_count", count, METH_VARARGS,
     "delta_count(old, new, num_elements, width, num_threads) -> changed elements"},
    {"delta_check", check, METH_VARARGS,
     "delta_check(table, its bytes, bytes of data, elements of each tensor, width of "
     "each tensor, num_tensors): ValueError says what is wrong"},
    {"delta_decode", decode, METH_VARARGS,
     "delta_decode(table, num_rows, data, its bytes, slots, places, their number, "
     "bits, "
     "their bytes, num_threads): ValueError says what is wrong"},
    {"delta_apply", apply_changes, METH_VARARGS,
     "delta_apply(tensor, its elements, places, bits, num, width, whether to add, "
     "num_threads): ValueError if a place is beyond the tensor"},
    {"swap_elements", swap_elements, METH_VARARGS,
     "swap_elements(table, num_rows) -> two sums over what was exchanged; a row is the "
     "addresses of offsets, bits and parameter, their number, elements of the "
     "parameter, number of the first in the log, width"},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

int add_delta(PyObject* module) { return PyModule_AddFunctions(module, methods); }

}  // namespace inflight
