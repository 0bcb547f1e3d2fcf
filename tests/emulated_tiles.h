// The tiles of AMX in plain C++, as Intel's manual has them, so that native/product_amx.cpp can be tried on processors
// without them (CMake option HOTROW_EMULATED_TILES). What would raise #UD or #GP ends the process with a line.
#pragma once

#include <hotrow/denormals.h>
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

struct EmulatedTiles {
  struct Tile {
    int rows = 0, row_bytes = 0;  // of its configuration; 0: none
    uint32_t words[16][16] = {};
  };
  bool configured = false;
  Tile tiles[8];

  static void require(bool holds, const char* rule) {
    if (holds) return;
    std::fprintf(stderr, "emulated tiles: %s\n", rule);
    std::abort();
  }

  Tile& at(int index) {
    require(configured, "#UD: tiles are not configured");
    require(0 <= index && index < 8, "#UD: there are eight tiles");
    require(tiles[index].rows > 0 && tiles[index].row_bytes > 0, "#UD: this tile is not configured");
    return tiles[index];
  }

  void configure(const void* from) {
    uint8_t bytes[64];
    std::memcpy(bytes, from, sizeof bytes);
    require(bytes[0] <= 1, "#GP: there are palettes 0 and 1");
    for (int i = 2; i < 16; ++i) require(bytes[i] == 0, "#GP: reserved bytes must be 0");
    configured = bytes[0] == 1;
    for (int i = 0; i < 16; ++i) {
      const int row_bytes = bytes[16 + 2 * i] + 256 * bytes[17 + 2 * i], rows = bytes[48 + i];
      require(i < 8 || (rows == 0 && row_bytes == 0), "#GP: there are eight tiles");
      require(rows <= 16 && row_bytes <= 64, "#GP: a tile has at most 16 rows of 64 bytes");
      require((rows == 0) == (row_bytes == 0), "#GP: rows without bytes, or bytes without rows");
      if (i < 8) tiles[i] = Tile{rows, row_bytes};
    }
  }

  void load(int index, const void* from, int64_t stride) {
    Tile& tile = at(index);
    std::memset(tile.words, 0, sizeof tile.words);
    for (int r = 0; r < tile.rows; ++r)
      std::memcpy(tile.words[r], static_cast<const char*>(from) + r * stride, static_cast<size_t>(tile.row_bytes));
  }

  void store(int index, void* to, int64_t stride) {
    const Tile& tile = at(index);
    for (int r = 0; r < tile.rows; ++r)
      std::memcpy(static_cast<char*>(to) + r * stride, tile.words[r], static_cast<size_t>(tile.row_bytes));
  }

  void zero(int index) { std::memset(at(index).words, 0, sizeof tiles[index].words); }

  static float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }

  // DAZ = FTZ = 1 whatever MXCSR says: here it is made to say so. No thread of ours rounds but to nearest even.
  void multiply(int sums, int left, int right) {
    Tile &c = at(sums), &a = at(left), &b = at(right);
    require(sums != left && sums != right && left != right, "#UD: an operand is given twice");
    require(a.row_bytes % 4 == 0 && b.row_bytes % 4 == 0 && c.row_bytes % 4 == 0, "#UD: rows of whole words");
    require(a.rows == c.rows && b.row_bytes == c.row_bytes && a.row_bytes == 4 * b.rows, "#UD: shapes do not fit");
    const hotrow::DenormalMode mode(hotrow::Denormals::flushed);
    for (int m = 0; m < c.rows; ++m) {
      float even[16] = {}, odd[16] = {};
      for (int k = 0; k < b.rows; ++k) {
        const uint32_t pair = a.words[m][k];
        for (int n = 0; n < c.row_bytes / 4; ++n) {
          even[n] = std::fma(as_float(pair << 16), as_float(b.words[k][n] << 16), even[n]);
          odd[n] = std::fma(as_float(pair & 0xFFFF0000u), as_float(b.words[k][n] & 0xFFFF0000u), odd[n]);
        }
      }
      for (int n = 0; n < c.row_bytes / 4; ++n) {
        const float sum = even[n] + odd[n], total = as_float(c.words[m][n]) + sum;
        std::memcpy(&c.words[m][n], &total, sizeof total);
      }
    }
  }
};

thread_local EmulatedTiles emulated_tiles;

}  // namespace

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) emulated_tiles.configure(config)
#define _tile_release() (emulated_tiles = {})
#define _tile_loadd(tile, from, stride) emulated_tiles.load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated_tiles.store(tile, to, stride)
#define _tile_zero(tile) emulated_tiles.zero(tile)
#define _tile_dpbf16ps(sums, left, right) emulated_tiles.multiply(sums, left, right)
