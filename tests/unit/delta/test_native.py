"""The native decoder stays inside its buffers, whatever it reads."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests.support.deltas import parts_of, random_bits, scattered, with_changes
from tests.unit.delta.test_part import SIZES, WIDTHS, part

CSRC = Path(__file__).parents[3] / "csrc"

PROGRAM = r"""
#include <cstdio>
#include <fstream>
#include <iterator>
#include <random>

#include "delta.h"
#include "delta_encode.h"

using namespace inflight::delta;
using Bytes = std::vector<unsigned char>;

Bytes read(const char* path) {
  std::ifstream file(path, std::ios::binary);
  return Bytes(std::istreambuf_iterator<char>(file), {});
}

// Decodes into memory of just the announced size.
void decode(const Bytes& table, const Bytes& data, const std::vector<uint64_t>& counts,
            const Bytes& widths) {
  const auto rows = check_table(table.data(), table.size(), data.size(), counts.data(),
                                widths.data(), counts.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    std::vector<int64_t> places(rows[i].num_entries);
    Bytes bits(uint64_t(rows[i].num_entries) * rows[i].width);
    check_bounds(rows[i], i, data.size());
    BlockDecoder(rows[i], i, data.data()).decode(places.data(), bits.data());
    for (size_t j = 0; j < places.size(); ++j)
      if (places[j] < 0 || uint64_t(places[j]) >= counts[rows[i].tensor] ||
          (j != 0 && places[j] <= places[j - 1]))
        throw std::logic_error("a place is beyond the tensor");
  }
}

int main(int count, char** words) {
  const Bytes table = read(words[1]), data = read(words[2]);
  std::vector<uint64_t> counts;
  Bytes widths;
  for (int i = 3; i + 1 < count; i += 2) {
    counts.push_back(std::stoull(words[i]));
    widths.push_back(uint8_t(std::stoul(words[i + 1])));
  }
  decode(table, data, counts, widths);
  std::mt19937 random(1);
  const unsigned char typical[] = {0, 1, 2, 127, 128, 254, 255};
  int accepted = 0, refused = 0;
  for (int i = 0; i < 20000; ++i) {
    Bytes other = table, damaged = data;
    for (unsigned n = 0; n <= random() % 3; ++n) {
      Bytes& into = random() % 2 ? other : damaged;
      into[random() % into.size()] =
          random() % 3 ? typical[random() % 7] : uint8_t(random());
    }
    if (random() % 50 == 0) damaged.resize(random() % damaged.size());
    if (random() % 50 == 0) other.resize(random() % other.size());
    try {
      decode(other, damaged, counts, widths);
      ++accepted;
    } catch (const Malformation&) {
      ++refused;
    }
  }
  // Every length of a tail, at memory of just that size.
  for (uint32_t size = 1; size < 300; ++size) {
    Scratch scratch;
    Bytes old_data(2 * size), new_data(2 * size);
    for (auto& each : new_data) each = random() % 4 == 0;
    if (const auto block = encode_block<uint16_t>(0, 0, old_data.data(),
                                                  new_data.data(), size, kAuto,
                                                  scratch)) {
      Pending pending;
      pending.add(*block);
      const auto [num, bytes] = pending.first(1 << 20);
      Bytes made(sizeof(Header) + num * sizeof(Row)), sections(bytes);
      pending.take(num, made.data(), sections.data());
      decode(made, sections, {size}, {2});
    }
  }
  std::printf("%d accepted, %d refused\n", accepted, refused);
}
"""


@pytest.mark.seconds
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_decoder_reads_and_writes_nothing_beyond_its_buffers(tmp_path):
    source, program = tmp_path / "damage.cpp", tmp_path / "damage"
    source.write_text(PROGRAM)
    checks = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    command = ["g++", "-std=c++17", "-O1", *checks, "-I", CSRC, source, "-o", program]
    subprocess.run(command, check=True)
    made = part()
    old = random_bits(torch.int8, 70_000)
    sparse = old, with_changes(old, scattered(70_000, 0.0005))
    for given, sizes, widths in (
        (made, SIZES, WIDTHS),
        (parts_of([sparse])[0], [70_000], [1]),
    ):
        for name in ("table", "data"):
            (tmp_path / name).write_bytes(bytes(getattr(given, name).tolist()))
        facts = [str(each) for pair in zip(sizes, widths, strict=True) for each in pair]
        done = subprocess.run(
            [program, tmp_path / "table", tmp_path / "data", *facts],
            capture_output=True,
            text=True,
            # vLLM has libraries loaded first, where the sanitizer's has to be.
            env={k: v for k, v in os.environ.items() if k != "LD_PRELOAD"},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        accepted, refused = (int(word) for word in done.stdout.split()[::2])
        assert accepted > 1000 and refused > 1000
