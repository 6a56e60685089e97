// Finds the elements that differ between two tensors, and encodes them by blocks.
#pragma once

#include <algorithm>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "delta.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace inflight {
namespace delta {

constexpr uint64_t kLine = 64;      // bytes that are compared at once
constexpr uint32_t kStretch = 128;  // lines that are compared before a closer look

struct Encoded {
  Row row;
  std::array<std::vector<unsigned char>, kNumSections> sections;

  uint64_t bytes() const {
    uint64_t sum = sizeof(Row);
    for (const uint64_t section : section_bytes(row)) sum += aligned(section);
    return sum;
  }
};

enum Choice { kAuto = 0, kOnlyRaw = kRaw, kOnlyDifference = kDifference };

// A bit for each byte of a line that differs.
inline uint64_t differing(const unsigned char* a, const unsigned char* b) {
  uint64_t mask = 0;
#ifdef __SSE2__
  __m128i equal[4];
  for (int i = 0; i < 4; ++i)
    equal[i] = _mm_cmpeq_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(a) + i),
                              _mm_loadu_si128(reinterpret_cast<const __m128i*>(b) + i));
  for (int i = 0; i < 4; ++i)
    mask |= uint64_t(uint32_t(_mm_movemask_epi8(equal[i])) ^ 0xFFFFu) << 16 * i;
#else
  for (uint64_t i = 0; i < kLine; ++i) mask |= uint64_t(a[i] != b[i]) << i;
#endif
  return mask;
}

// Of a mask of bytes, the lowest bit of each element that has a bit.
template <class T>
uint64_t elements_of(uint64_t mask) {
  if (sizeof(T) >= 2) mask |= mask >> 1;
  if (sizeof(T) >= 4) mask |= mask >> 2;
  if (sizeof(T) >= 8) mask |= mask >> 4;
  constexpr uint64_t kLowest[] = {
      0, ~uint64_t(0),       0x5555555555555555u, 0, 0x1111111111111111u, 0, 0,
      0, 0x0101010101010101u};
  return mask & kLowest[sizeof(T)];
}

// Memory that one block after another uses: a new page costs more than filling it.
class Scratch {
 public:
  // Not initialised, so that a page that is not needed costs nothing.
  unsigned char* reserve(uint64_t bytes) {
    if (bytes > size_) {
      memory_.reset();
      memory_.reset(new unsigned char[bytes]);
      size_ = bytes;
    }
    return memory_.get();
  }

 private:
  std::unique_ptr<unsigned char[]> memory_;
  uint64_t size_ = 0;
};

// One for each thread that encodes at the same time.
class Scratches {
 public:
  // Calls work(scratch), and returns its result.
  template <class Work>
  auto lend(const Work& work) {
    std::unique_ptr<Scratch> own;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!free_.empty()) {
        own = std::move(free_.back());
        free_.pop_back();
      }
    }
    if (!own) own = std::make_unique<Scratch>();
    auto result = work(*own);
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(std::move(own));
    return result;
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Scratch>> free_;
};

// The elements of a block that differ: their places, and the bits on both sides.
template <class T>
class Found {
 public:
  Found(uint64_t most, Scratch& scratch) {
    unsigned char* memory = scratch.reserve((most + 1) * (2 * sizeof(T) + 4) + 16);
    before = reinterpret_cast<T*>(memory);
    now = before + most + 1;
    places = reinterpret_cast<uint32_t*>(memory + aligned((most + 1) * 2 * sizeof(T)));
  }

  void search(const unsigned char* old_data, const unsigned char* new_data,
              uint32_t num_elements) {
    constexpr uint32_t kPerLine = kLine / sizeof(T);
    uint32_t* const place_at = places;
    T *const before_at = before, *const now_at = now;
    uint32_t end = 0;
    const auto take = [&](uint32_t i) {
      place_at[end] = i;
      before_at[end] = load<T>(old_data + uint64_t(i) * sizeof(T));
      now_at[end] = load<T>(new_data + uint64_t(i) * sizeof(T));
    };
    // First all lines of a stretch without a branch, since about every fourth line has
    // a change at 1 %: the processor would guess wrong too often.
    uint64_t masks[kStretch];
    uint32_t lines[kStretch];
    uint32_t start = 0;
    while (num_elements - start >= kPerLine) {
      const uint32_t left = (num_elements - start) / kPerLine;
      const uint32_t num = std::min(left, kStretch);
      uint32_t differ = 0;
      for (uint32_t i = 0; i < num; ++i, start += kPerLine) {
        const uint64_t at = uint64_t(start) * sizeof(T);
        masks[differ] = differing(old_data + at, new_data + at);
        lines[differ] = start;
        differ += masks[differ] != 0;
      }
      for (uint32_t i = 0; i < differ; ++i) {
        uint64_t mask = elements_of<T>(masks[i]);
        if (uint64_t(__builtin_popcountll(mask)) * 4 < kPerLine) {
          for (; mask != 0; mask &= mask - 1, ++end)
            take(lines[i] + uint32_t(__builtin_ctzll(mask) / sizeof(T)));
          continue;
        }
        for (uint32_t j = 0; j < kPerLine; ++j) {
          take(lines[i] + j);
          end += uint32_t(mask >> j * sizeof(T)) & 1;
        }
      }
    }
    for (; start < num_elements; ++start) {
      take(start);
      end += before_at[end] != now_at[end];
    }
    count = end;
  }

  uint32_t* places;
  T *before, *now;
  uint32_t count = 0;
};

template <class T>
uint64_t count_changed(const unsigned char* old_data, const unsigned char* new_data,
                       uint64_t num_elements) {
  constexpr uint64_t kPerLine = kLine / sizeof(T);
  uint64_t count = 0, start = 0;
  for (; num_elements - start >= kPerLine; start += kPerLine) {
    const uint64_t at = start * sizeof(T);
    const uint64_t mask = elements_of<T>(differing(old_data + at, new_data + at));
    count += uint64_t(__builtin_popcountll(mask));
  }
  for (uint64_t at = start * sizeof(T); start < num_elements; ++start, at += sizeof(T))
    count += load<T>(old_data + at) != load<T>(new_data + at);
  return count;
}

// A difference as an unsigned number that is small if the difference is: 0, -1, 1, -2.
template <class T>
T zigzag(T difference) {
  constexpr int kSign = 8 * int(sizeof(T)) - 1;
  return T(T(difference << 1) ^ T(-T(difference >> kSign)));
}

// Encodes the entries of one block; `places` are counted from element `start`.
template <class T>
class BlockEncoder {
 public:
  BlockEncoder(const uint32_t* places, const T* before, const T* now, uint32_t count)
      : places_(places), before_(before), now_(now), count_(count) {}

  Encoded encode(uint32_t tensor, uint64_t start, Choice choice) {
    Row& row = out_.row;
    row = {};
    row.tensor = tensor;
    row.width = sizeof(T);
    row.first = start + places_[0];
    row.num_elements = places_[count_ - 1] - places_[0] + 1;
    row.num_entries = count_;
    choose_values(choice);
    choose_places();
    return std::move(out_);
  }

 private:
  void choose_values(Choice choice) {
    Row& row = out_.row;
    uint64_t escapes8 = 0, escapes16 = 0;
    for (uint32_t i = 0; i < count_; ++i) {
      const T code = zigzag<T>(T(now_[i] - before_[i]));
      escapes8 += code >= 0xFF;
      escapes16 += code >= 0xFFFF;
    }
    const uint64_t raw = uint64_t(count_) * sizeof(T);
    const uint64_t with8 = count_ + escapes8 * sizeof(T);
    const uint64_t with16 = 2 * uint64_t(count_) + escapes16 * sizeof(T);
    const bool is16 = sizeof(T) >= 4 && with16 < with8;
    if (choice == kOnlyRaw || (choice == kAuto && raw <= (is16 ? with16 : with8))) {
      row.values = kRaw;
      out_.sections[kBits].resize(raw);
      std::memcpy(out_.sections[kBits].data(), now_, raw);
      return;
    }
    row.values = kDifference;
    row.code_bytes = is16 ? 2 : 1;
    row.num_exceptions = uint32_t(is16 ? escapes16 : escapes8);
    if (is16)
      differences<uint16_t>();
    else
      differences<uint8_t>();
  }

  template <class Code>
  void differences() {
    constexpr Code kEscape = Code(~Code(0));
    std::vector<unsigned char>& codes = out_.sections[kBits];
    std::vector<unsigned char>& exceptions = out_.sections[kExceptions];
    codes.resize(uint64_t(count_) * sizeof(Code));
    exceptions.resize(uint64_t(out_.row.num_exceptions) * sizeof(T));
    uint64_t at = 0;
    for (uint32_t i = 0; i < count_; ++i) {
      const T difference = T(now_[i] - before_[i]);
      const T wide = zigzag<T>(difference);
      const Code code = wide >= kEscape ? kEscape : Code(wide);
      std::memcpy(&codes[i * sizeof(Code)], &code, sizeof(Code));
      if (code != kEscape) continue;
      std::memcpy(&exceptions[at], &difference, sizeof(T));
      at += sizeof(T);
    }
  }

  void choose_places() {
    Row& row = out_.row;
    if (row.num_entries == row.num_elements) {
      row.form = kWhole;
      return;
    }
    uint64_t codes8 = 1, codes16 = 1, runs = 1;
    for (uint32_t i = 1; i < count_; ++i) {
      const uint32_t gap = places_[i] - places_[i - 1] - 1;
      codes8 += 1 + gap / 0xFF;
      codes16 += 1 + gap / 0xFFFF;
      runs += gap != 0;
    }
    uint64_t least = UINT64_MAX;
    for (const auto& [form, codes] : {std::pair<Form, uint64_t>{kGaps8, codes8},
                                      {kGaps16, codes16},
                                      {kBitmap, 0},
                                      {kRuns, runs}}) {
      Row other = row;
      other.form = form;
      other.num_codes = uint32_t(codes);
      const auto bytes = section_bytes(other);
      if (bytes[kChunks] + bytes[kPlaces] >= least) continue;
      least = bytes[kChunks] + bytes[kPlaces];
      row.form = form;
      row.num_codes = other.num_codes;
    }
    const auto bytes = section_bytes(row);
    out_.sections[kChunks].resize(bytes[kChunks]);
    out_.sections[kPlaces].resize(bytes[kPlaces]);
    switch (row.form) {
      case kGaps8:
        gaps<uint8_t>();
        break;
      case kGaps16:
        gaps<uint16_t>();
        break;
      case kBitmap:
        bitmap();
        break;
      default:
        runs_();
    }
  }

  template <class Code>
  void gaps() {
    constexpr Code kMost = Code(~Code(0));
    unsigned char* codes = out_.sections[kPlaces].data();
    unsigned char* chunks = out_.sections[kChunks].data();
    const Row& row = out_.row;
    const unsigned char* values = out_.sections[kBits].data();
    uint64_t num_codes = 0, counted = 0, exceptions = 0;
    uint32_t position = 0, entries = 0;
    const auto put = [&](Code code) {
      if (num_codes % kChunkCodes == 0) {
        if (row.code_bytes != 0)
          exceptions += count_escapes(values + counted * row.code_bytes,
                                      entries - counted, row.code_bytes);
        counted = entries;
        const Chunk chunk{position, entries, uint32_t(exceptions)};
        std::memcpy(chunks + num_codes / kChunkCodes * sizeof(Chunk), &chunk,
                    sizeof(Chunk));
      }
      std::memcpy(codes + num_codes++ * sizeof(Code), &code, sizeof(Code));
    };
    for (; entries < count_; ++entries) {
      const uint32_t place = places_[entries] - places_[0];
      for (; place - position >= kMost; position += kMost) put(kMost);
      put(Code(place - position));
      position = place + 1;
    }
  }

  void bitmap() {
    unsigned char* bits = out_.sections[kPlaces].data();
    for (uint32_t i = 0; i < count_; ++i) {
      const uint32_t place = places_[i] - places_[0];
      bits[place / 8] |= uint8_t(1u << place % 8);
    }
  }

  void runs_() {
    unsigned char* out = out_.sections[kPlaces].data();
    for (uint32_t i = 0; i < count_;) {
      uint32_t length = 1;
      while (i + length < count_ && places_[i + length] == places_[i] + length)
        ++length;
      const uint32_t run[2] = {places_[i] - places_[0], length};
      std::memcpy(out, run, sizeof run);
      out += sizeof run;
      i += length;
    }
  }

  const uint32_t* const places_;
  const T* const before_;
  const T* const now_;
  const uint32_t count_;
  Encoded out_;
};

// The changes of `num_elements` elements, of which the first is element `start`.
template <class T>
std::optional<Encoded> encode_block(uint32_t tensor, uint64_t start,
                                    const unsigned char* old_data,
                                    const unsigned char* new_data,
                                    uint32_t num_elements, Choice choice,
                                    Scratch& scratch) {
  Found<T> found(num_elements, scratch);
  found.search(old_data, new_data, num_elements);
  if (found.count == 0) return std::nullopt;
  return BlockEncoder<T>(found.places, found.before, found.now, found.count)
      .encode(tensor, start, choice);
}

// Encoded blocks that wait for their part.
class Pending {
 public:
  void add(Encoded block) {
    bytes_ += block.bytes();
    blocks_.push_back(std::move(block));
  }

  // Bytes of a part of all blocks.
  uint64_t bytes() const { return blocks_.empty() ? 0 : sizeof(Header) + bytes_; }

  // The first blocks that fit into a part of `limit` bytes, at least one; and the
  // bytes of its data.
  std::pair<uint64_t, uint64_t> first(uint64_t limit) const {
    uint64_t rows = 0, bytes = sizeof(Header);
    for (const Encoded& block : blocks_) {
      if (rows != 0 && bytes + block.bytes() > limit) break;
      bytes += block.bytes();
      ++rows;
    }
    return {rows, bytes - sizeof(Header) - rows * sizeof(Row)};
  }

  // Writes the part of the first blocks, and drops them.
  void take(uint64_t num_rows, unsigned char* table, unsigned char* data) {
    if (num_rows > blocks_.size())
      throw std::out_of_range("so many blocks do not wait");
    std::vector<Row> rows;
    for (uint64_t i = 0; i < num_rows; ++i) rows.push_back(blocks_[i].row);
    const uint64_t size = lay_out(rows);
    Header header{{}, kVersion, 0, uint32_t(num_rows), 0, size, size};
    std::memcpy(header.magic, kMagic, sizeof kMagic);
    std::memcpy(table, &header, sizeof header);
    if (num_rows != 0)
      std::memcpy(table + sizeof header, rows.data(), num_rows * sizeof(Row));
    for (const Row& row : rows) {
      const Encoded& block = blocks_.front();
      for (int kind = 0; kind < kNumSections; ++kind) {
        const std::vector<unsigned char>& section = block.sections[kind];
        if (section.empty()) continue;
        unsigned char* to = data + row.at[kind];
        std::memcpy(to, section.data(), section.size());
        std::memset(to + section.size(), 0, aligned(section.size()) - section.size());
      }
      bytes_ -= block.bytes();
      blocks_.pop_front();
    }
  }

 private:
  std::deque<Encoded> blocks_;
  uint64_t bytes_ = 0;
};

}  // namespace delta
}  // namespace inflight
