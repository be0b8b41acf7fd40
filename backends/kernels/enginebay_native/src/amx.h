// Products of rounded rows with a weight of 8 bits in the tiles of AMX. They are the same whole numbers as those of VNNI, so
// that the bits of a result depend on neither.
#pragma once

#include "int8_products.h"

#if defined(__AMX_INT8__) && defined(__AVX512F__) && defined(__linux__)
#define ENGINEBAY_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace enginebay {
namespace {

constexpr int64_t kTile = 16;         // rows, or outputs, of a tile
constexpr int64_t kTileInputs = 64;   // inputs of a tile
constexpr int64_t kFewestTiledRows = 8;

#ifdef ENGINEBAY_AMX

// Whether the system lets this process use tiles. Linux wants to be asked once.
inline bool has_tiles() {
  constexpr int kRequest = 0x1023, kTileData = 18;
  static const bool allowed = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return allowed;
}

// Tiles while it lives: 0 to 3 are sums, 4 and 5 weights, 6 and 7 inputs.
class TileRegisters {
 public:
  TileRegisters() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 8; ++i) config.row_bytes[i] = 64, config.rows[i] = 16;
    asm volatile("" : : "r"(&config) : "memory");  // the intrinsic does not tell the compiler that it reads all of it
    _tile_loadconfig(&config);
  }
  ~TileRegisters() { _tile_release(); }
  TileRegisters(const TileRegisters&) = delete;
};

// Transposes 16 x 16 numbers in registers.
ENGINEBAY_INLINE void transpose(Ints* v) {
  Ints t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    t[i] = (Ints)_mm512_unpacklo_epi32((__m512i)v[i], (__m512i)v[i + 1]);
    t[i + 1] = (Ints)_mm512_unpackhi_epi32((__m512i)v[i], (__m512i)v[i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4) {
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      v[i + 2 * j] = (Ints)_mm512_unpacklo_epi64((__m512i)t[i + j], (__m512i)t[i + j + 2]);
      v[i + 2 * j + 1] = (Ints)_mm512_unpackhi_epi64((__m512i)t[i + j], (__m512i)t[i + j + 2]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    __m512i a = (__m512i)v[i], b = (__m512i)v[i + 4], c = (__m512i)v[i + 8], d = (__m512i)v[i + 12];
    __m512i ab = _mm512_shuffle_i32x4(a, b, 0x88), ba = _mm512_shuffle_i32x4(a, b, 0xdd);
    __m512i cd = _mm512_shuffle_i32x4(c, d, 0x88), dc = _mm512_shuffle_i32x4(c, d, 0xdd);
    t[i] = (Ints)_mm512_shuffle_i32x4(ab, cd, 0x88);
    t[i + 4] = (Ints)_mm512_shuffle_i32x4(ba, dc, 0x88);
    t[i + 8] = (Ints)_mm512_shuffle_i32x4(ab, cd, 0xdd);
    t[i + 12] = (Ints)_mm512_shuffle_i32x4(ba, dc, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) v[i] = t[i];
}

// 16 rounded rows as tiles of inputs: for each 64 inputs, 16 lines of 4 inputs of each row.
inline void tile_rows(const int8_t* rows, int64_t stride, int64_t in, int8_t* tiles) {
  for (int64_t k = 0; k < in; k += kTileInputs, tiles += kTile * kTileInputs) {
    Ints v[16];
    for (int r = 0; r < 16; ++r) v[r] = load_ints(rows + r * stride + k);
    transpose(v);
    std::memcpy(tiles, v, sizeof(v));
  }
}

// Writes a tile of sums [16 outputs, 16 rows] into out[rows, 16] with their scales.
inline void put_tile(const int32_t* sums, const float* row_scales, const float* scales, float* out, int64_t rows,
                     int64_t stride) {
  Ints v[16];
  std::memcpy(v, sums, sizeof(v));
  transpose(v);
  Floats weights = load(scales);
  for (int64_t r = 0; r < rows; ++r) store(out + r * stride, to_floats(v[r]) * (splat(row_scales[r]) * weights));
}

// 32 outputs of up to 16 kTokens rows. `tiles` are those of tile_rows; every step prefetches weights that are `ahead`.
template <int kTokens>
void multiply_tiles(const Int8Weight& w, const int8_t* tiles, const float* row_scales, float* out, int64_t rows,
                    int64_t stride, int64_t ahead) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const int8_t *a = w.values, *b = tiles;
  for (int64_t k = 0; k < w.in; k += kTileInputs, a += kTileInputs, b += kTile * kTileInputs) {
    _tile_loadd(6, b, 64);
    _tile_loadd(4, a, w.in);
    _tile_dpbssd(0, 4, 6);
    _tile_loadd(5, a + kTile * w.in, w.in);
    _tile_dpbssd(1, 5, 6);
    if (kTokens == 2) {
      _tile_loadd(7, b + kTile * w.in, 64);
      _tile_dpbssd(2, 4, 7);
      _tile_dpbssd(3, 5, 7);
    }
    if (ahead)
      for (int i = 0; i < 32; ++i) fetch(a + i * w.in + ahead);
  }
  alignas(64) int32_t sums[4][256];
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  if (kTokens == 2) {
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
  }
  for (int i = 0; i < 2 * kTokens; ++i) {
    int64_t row = i / 2 * kTile, output = i % 2 * kTile;
    put_tile(sums[i], row_scales + row, w.scales + output, out + row * stride + output, std::min(kTile, rows - row), stride);
  }
}

// out[rows, width], width a multiple of 32. Weights of 32 outputs stay in the cache while all rows are multiplied.
inline void tiled_block(const int8_t* tiles, const float* row_scales, const Int8Weight& weight, float* out, int64_t rows,
                        int64_t width, int64_t stride) {
  TileRegisters registers;
  for (int64_t c = 0; c < width; c += 2 * kTile) {
    Int8Weight w = weight.from(c);
    for (int64_t r = 0; r < rows; r += 2 * kTile) {
      int64_t ahead = r == 0 ? 2 * kTile * w.in : 0;
      const int8_t* from = tiles + r * w.in;
      float* to = out + r * stride + c;
      if (rows - r > kTile) {
        multiply_tiles<2>(w, from, row_scales + r, to, std::min(2 * kTile, rows - r), stride, ahead);
      } else {
        multiply_tiles<1>(w, from, row_scales + r, to, rows - r, stride, ahead);
      }
    }
  }
}

#else

inline bool has_tiles() { return false; }
inline void tile_rows(const int8_t*, int64_t, int64_t, int8_t*) {}
inline void tiled_block(const int8_t*, const float*, const Int8Weight&, float*, int64_t, int64_t, int64_t) {}

#endif

}  // namespace
}  // namespace enginebay
