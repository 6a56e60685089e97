// The parts of a delta (docs/delta-format.md): their layout, the check of a table, and
// the decoder of a block. Nothing is read before its bounds are checked.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "a delta is defined in little-endian bytes"
#endif

namespace inflight {
namespace delta {

constexpr char kMagic[8] = {'v', 'i', 'f', 'd', 'e', 'l', 't', 'a'};
constexpr uint32_t kVersion = 1;
constexpr uint32_t kZstd = 1;  // a flag: `data` is one frame of zstd
constexpr uint32_t kMaxElements = 1u << 22;
constexpr uint32_t kChunkCodes = 1024;

enum Form : uint8_t { kGaps8 = 1, kGaps16, kBitmap, kRuns, kWhole };
enum Values : uint8_t { kRaw = 1, kDifference };

struct Header {
  char magic[8];
  uint32_t version, flags, num_rows, reserved;
  uint64_t data_bytes, stored_bytes;
};

enum Section { kChunks, kPlaces, kBits, kExceptions, kNumSections };

struct Row {
  uint32_t tensor;
  uint8_t width, form, values, code_bytes;
  uint64_t first;
  uint32_t num_elements, num_entries, num_exceptions, num_codes;
  std::array<uint64_t, kNumSections> at;  // offsets of the sections in `data`
};

// The state before the first code of a chunk.
struct Chunk {
  uint32_t position, entries, exceptions;
};

static_assert(sizeof(Header) == 40 && sizeof(Row) == 64 && sizeof(Chunk) == 12,
              "the structs are the format");

class Malformation : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  Malformation(uint64_t row, const std::string& what)
      : std::runtime_error("row " + std::to_string(row) + ": " + what) {}
};

template <class T>
T load(const unsigned char* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

inline uint64_t aligned(uint64_t bytes) { return (bytes + 7) & ~uint64_t(7); }

inline uint64_t gap_bytes(const Row& row) {
  return row.form == kGaps8 ? 1 : row.form == kGaps16 ? 2 : 0;
}

inline std::array<uint64_t, kNumSections> section_bytes(const Row& row) {
  const uint64_t codes = row.num_codes, gap = gap_bytes(row);
  const uint64_t chunks = gap ? (codes + kChunkCodes - 1) / kChunkCodes : 0;
  uint64_t places = gap * codes;
  if (row.form == kBitmap) places = (uint64_t(row.num_elements) + 7) / 8;
  if (row.form == kRuns) places = 8 * codes;
  const uint64_t value = row.values == kRaw ? row.width : row.code_bytes;
  return {chunks * sizeof(Chunk), places, value * row.num_entries,
          uint64_t(row.width) * row.num_exceptions};
}

// Sets the offsets of all sections, and returns the bytes of `data`. All sections of a
// kind follow one another, because compression profits from like beside like.
inline uint64_t lay_out(std::vector<Row>& rows) {
  uint64_t end = 0;
  for (int kind = 0; kind < kNumSections; ++kind)
    for (Row& row : rows) {
      row.at[kind] = end;
      end += aligned(section_bytes(row)[kind]);
    }
  return end;
}

// What can be said of a row without its sections.
inline void check_row(const Row& row, uint64_t index, const uint64_t* counts,
                      const unsigned char* widths, uint64_t num_tensors) {
  const auto demand = [&](bool holds, const char* what) {
    if (!holds) throw Malformation(index, what);
  };
  demand(row.tensor < num_tensors, "the delta names no tensor of that number");
  demand(row.width == 1 || row.width == 2 || row.width == 4 || row.width == 8,
         "an element has 1, 2, 4 or 8 bytes");
  demand(row.width == widths[row.tensor], "the tensor's elements have another width");
  demand(row.form >= kGaps8 && row.form <= kWhole, "unknown form of places");
  demand(row.values == kRaw || row.values == kDifference, "unknown form of values");
  if (row.values == kRaw)
    demand(row.code_bytes == 0 && row.num_exceptions == 0, "raw values have no codes");
  else
    demand(row.code_bytes == 1 || (row.code_bytes == 2 && row.width >= 4),
           "wrong width of the codes of differences");
  demand(row.num_elements >= 1 && row.num_elements <= kMaxElements,
         "a block has 1 to 4194304 elements");
  const uint64_t count = counts[row.tensor];
  demand(row.num_elements <= count && row.first <= count - row.num_elements,
         "the block reaches beyond the tensor");
  demand(row.num_entries >= 1 && row.num_entries <= row.num_elements,
         "a block has at least one entry, and at most one for each element");
  demand(row.num_exceptions <= row.num_entries, "more exceptions than entries");
  uint64_t least = 0, most = 0;
  if (const uint64_t gap = gap_bytes(row)) {
    least = row.num_entries;
    most = least + row.num_elements / (gap == 1 ? 0xFF : 0xFFFF);
  } else if (row.form == kRuns) {
    least = 1;
    most = row.num_entries;
  }
  demand(row.num_codes >= least && row.num_codes <= most,
         "the number of codes does not fit the number of entries");
  if (row.form == kWhole)
    demand(row.num_entries == row.num_elements, "a whole block has all its elements");
}

// The rows of a table of `size` bytes. `stored` is the number of bytes of `data` as it
// came; of each tensor, `counts` has the elements and `widths` the bytes of an element.
inline std::vector<Row> check_table(const unsigned char* table, uint64_t size,
                                    uint64_t stored, const uint64_t* counts,
                                    const unsigned char* widths, uint64_t num_tensors) {
  if (size < sizeof(Header)) throw Malformation("the table is shorter than its header");
  const Header header = load<Header>(table);
  if (std::memcmp(header.magic, kMagic, sizeof kMagic) != 0)
    throw Malformation("the table does not begin with 'vifdelta'");
  if (header.version != kVersion)
    throw Malformation("format version " + std::to_string(header.version) +
                       " is not known; this reader knows version 1");
  if ((header.flags & ~kZstd) != 0 || header.reserved != 0)
    throw Malformation("the header has unknown flags");
  if (size != sizeof(Header) + uint64_t(header.num_rows) * sizeof(Row))
    throw Malformation("the table's length does not fit its number of rows");
  if (header.stored_bytes != stored)
    throw Malformation("data has " + std::to_string(stored) +
                       " bytes, and the header announces " +
                       std::to_string(header.stored_bytes));
  if (header.flags == 0 && header.data_bytes != stored)
    throw Malformation("data that is not compressed has two lengths");
  std::vector<Row> rows(header.num_rows);
  if (!rows.empty())
    std::memcpy(rows.data(), table + sizeof(Header), rows.size() * sizeof(Row));
  for (uint64_t i = 0; i < rows.size(); ++i) {
    check_row(rows[i], i, counts, widths, num_tensors);
    if (i == 0 || rows[i].tensor > rows[i - 1].tensor) continue;
    if (rows[i].tensor < rows[i - 1].tensor ||
        rows[i].first < rows[i - 1].first + rows[i - 1].num_elements)
      throw Malformation(i, "it is not behind the row before it");
  }
  std::vector<Row> wanted = rows;
  if (lay_out(wanted) != header.data_bytes)
    throw Malformation("the sections do not fill data exactly");
  for (uint64_t i = 0; i < rows.size(); ++i)
    if (rows[i].at != wanted[i].at)
      throw Malformation(i, "a section is not in its place");
  return rows;
}

// Whether a row, which may have changed since the check of its table, can be decoded.
inline void check_bounds(const Row& row, uint64_t index, uint64_t data_bytes) {
  const uint64_t count = UINT64_MAX;
  Row alone = row;
  alone.tensor = 0;
  check_row(alone, index, &count, &row.width, 1);
  const auto sizes = section_bytes(row);
  for (int kind = 0; kind < kNumSections; ++kind)
    if (sizes[kind] > data_bytes || row.at[kind] > data_bytes - sizes[kind])
      throw Malformation(index, "a section is not inside data");
}

// The escapes among `num` codes of differences.
inline uint64_t count_escapes(const unsigned char* codes, uint64_t num,
                              uint64_t code_bytes) {
  uint64_t count = 0;
  if (code_bytes == 1)
    for (uint64_t i = 0; i < num; ++i) count += codes[i] == 0xFF;
  else
    for (uint64_t i = 0; i < num; ++i) count += load<uint16_t>(codes + 2 * i) == 0xFFFF;
  return count;
}

// Decodes one checked row, whose sections are inside `data`.
class BlockDecoder {
 public:
  BlockDecoder(const Row& row, uint64_t index, const unsigned char* data)
      : row_(row), index_(index), data_(data) {}

  // Writes `num_entries` indexes of elements, and as many values.
  void decode(int64_t* places, unsigned char* bits) const {
    switch (row_.form) {
      case kGaps8:
        gaps<uint8_t>(places);
        break;
      case kGaps16:
        gaps<uint16_t>(places);
        break;
      case kBitmap:
        bitmap(places);
        break;
      case kRuns:
        runs(places);
        break;
      default:
        for (uint32_t i = 0; i < row_.num_entries; ++i)
          places[i] = int64_t(row_.first + i);
    }
    switch (row_.width) {
      case 1:
        values<uint8_t>(bits);
        break;
      case 2:
        values<uint16_t>(bits);
        break;
      case 4:
        values<uint32_t>(bits);
        break;
      default:
        values<uint64_t>(bits);
    }
  }

 private:
  void demand(bool holds, const char* what) const {
    if (!holds) throw Malformation(index_, what);
  }

  const unsigned char* section(Section kind) const { return data_ + row_.at[kind]; }

  template <class Code>
  void gaps(int64_t* places) const {
    constexpr Code kMost = Code(~Code(0));
    const unsigned char* codes = section(kPlaces);
    uint64_t position = 0, entries = 0, counted = 0, exceptions = 0;
    Code code = kMost;
    for (uint64_t i = 0; i < row_.num_codes;) {
      if (row_.code_bytes != 0)
        exceptions += count_escapes(section(kBits) + counted * row_.code_bytes,
                                    entries - counted, row_.code_bytes);
      counted = entries;
      const Chunk chunk =
          load<Chunk>(section(kChunks) + i / kChunkCodes * sizeof(Chunk));
      demand(chunk.position == position && chunk.entries == entries &&
                 chunk.exceptions == exceptions,
             "the table of chunks does not fit the codes");
      const uint64_t left = row_.num_codes - i;
      for (const uint64_t end = i + (left < kChunkCodes ? left : kChunkCodes); i < end;
           ++i) {
        code = load<Code>(codes + i * sizeof(Code));
        position += code;
        if (code == kMost) continue;
        demand(position < row_.num_elements, "a place is beyond the block");
        demand(entries < row_.num_entries, "more places than entries");
        places[entries++] = int64_t(row_.first + position++);
      }
    }
    demand(code != kMost, "the last code of the places is no place");
    demand(entries == row_.num_entries, "fewer places than entries");
  }

  void bitmap(int64_t* places) const {
    uint64_t entries = 0;
    for (uint64_t start = 0; start < row_.num_elements; start += 64) {
      const uint64_t bytes = (uint64_t(row_.num_elements) + 7) / 8 - start / 8;
      uint64_t word = 0;
      std::memcpy(&word, section(kPlaces) + start / 8, bytes < 8 ? bytes : 8);
      for (; word != 0; word &= word - 1) {
        const uint64_t place = start + uint64_t(__builtin_ctzll(word));
        demand(place < row_.num_elements, "a place is beyond the block");
        demand(entries < row_.num_entries, "more places than entries");
        places[entries++] = int64_t(row_.first + place);
      }
    }
    demand(entries == row_.num_entries, "fewer places than entries");
  }

  void runs(int64_t* places) const {
    uint64_t end = 0, entries = 0;
    for (uint64_t i = 0; i < row_.num_codes; ++i) {
      const uint64_t start = load<uint32_t>(section(kPlaces) + 8 * i);
      const uint64_t length = load<uint32_t>(section(kPlaces) + 8 * i + 4);
      demand(length != 0, "a run is empty");
      demand(i == 0 || start >= end, "a run is not behind the run before it");
      end = start + length;
      demand(end <= row_.num_elements, "a place is beyond the block");
      demand(length <= row_.num_entries - entries, "more places than entries");
      for (uint64_t place = start; place < end; ++place)
        places[entries++] = int64_t(row_.first + place);
    }
    demand(entries == row_.num_entries, "fewer places than entries");
  }

  template <class T>
  void values(unsigned char* bits) const {
    const unsigned char* codes = section(kBits);
    if (row_.values == kRaw) {
      std::memcpy(bits, codes, uint64_t(row_.num_entries) * sizeof(T));
      return;
    }
    demand(
        count_escapes(codes, row_.num_entries, row_.code_bytes) == row_.num_exceptions,
        "the codes of differences have another number of exceptions");
    if (row_.code_bytes == 1)
      differences<T, uint8_t>(bits);
    else
      differences<T, uint16_t>(bits);
  }

  template <class T, class Code>
  void differences(unsigned char* bits) const {
    constexpr Code kEscape = Code(~Code(0));
    const unsigned char* codes = section(kBits);
    const unsigned char* exception = section(kExceptions);
    for (uint64_t i = 0; i < row_.num_entries; ++i) {
      const Code code = load<Code>(codes + i * sizeof(Code));
      T difference = T(T(code >> 1) ^ T(-T(code & 1)));
      if (code == kEscape) {
        difference = load<T>(exception);
        exception += sizeof(T);
      }
      std::memcpy(bits + i * sizeof(T), &difference, sizeof(T));
    }
  }

  const Row& row_;
  const uint64_t index_;
  const unsigned char* const data_;
};

// Writes `num` values to the elements at `places`, or adds them to these elements.
template <class T>
void apply(unsigned char* data, const int64_t* places, const unsigned char* bits,
           uint64_t num, bool add) {
  for (uint64_t i = 0; i < num; ++i) {
    unsigned char* const at = data + uint64_t(places[i]) * sizeof(T);
    T value = load<T>(bits + i * sizeof(T));
    if (add) value = T(value + load<T>(at));
    std::memcpy(at, &value, sizeof(T));
  }
}

}  // namespace delta
}  // namespace inflight
