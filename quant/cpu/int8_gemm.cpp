// Products of float32 activations with int8 weights: linear layers, and all experts of a layer at once.
//
// Weights are int8 with one scale per output channel. Activations are quantized here, per row, to 14 bits
// (largest magnitude -> 8191), so the product is a sum of int16 x int8 terms that integer arithmetic adds
// exactly: 8191 * 127 * 2048 < 2^31. The result of a row therefore does not depend on the other rows of the
// batch, on the number of threads or on the instruction set (AVX2, AVX-512, VNNI, plain C++), and the
// rounding of activations is far below that of the weights. Contraction into fused multiply-adds is switched
// off at build time to keep the few float operations identical as well.
//
// Layout of weights: panels of 32 output channels, each two blocks of 16; a block is [K/2][16][2] bytes, so
// one vector load holds two consecutive k for each of its channels, as the multiply-add of int16 pairs wants.
// An expert's gate/up matrix has 16 gate and the matching 16 up channels in one panel. Layout of quantized
// activations: tiles of up to 6 rows, [K/2][rows] pairs of int16.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

namespace {

constexpr int kRows = 6;            // rows of a tile: 12 accumulators of 16 registers on AVX2
constexpr int kPanel = 32;          // output channels of a panel
constexpr int kBlock = 16;          // output channels of a block
constexpr int kLevels = 8191;       // largest quantized activation
constexpr int64_t kChunk = 1024;    // pairs of k that int32 accumulators can hold
constexpr int64_t kFew = 16;        // rows up to which waiting for other threads costs more than their help

using TileFn = void (*)(const int32_t* x, const int8_t* w0, const int8_t* w1, int64_t pairs, int32_t* acc);

// ---- integer tiles: acc[row][32] = sum over pairs; w0 and w1 are the panel's two blocks -----------------

template <int R>
void tile_plain(const int32_t* x, const int8_t* w0, const int8_t* w1, int64_t pairs, int32_t* acc) {
  std::fill(acc, acc + R * kPanel, 0);
  for (int64_t p = 0; p < pairs; ++p)
    for (int r = 0; r < R; ++r) {
      int16_t pair[2];
      std::memcpy(pair, x + p * R + r, sizeof pair);
      for (int n = 0; n < kBlock; ++n) {
        const int8_t* a = w0 + p * kPanel + 2 * n;
        const int8_t* b = w1 + p * kPanel + 2 * n;
        acc[r * kPanel + n] += pair[0] * a[0] + pair[1] * a[1];
        acc[r * kPanel + kBlock + n] += pair[0] * b[0] + pair[1] * b[1];
      }
    }
}

#if defined(__x86_64__)
template <int R>
__attribute__((target("avx2"))) void tile_avx2(const int32_t* x, const int8_t* w0, const int8_t* w1,
                                               int64_t pairs, int32_t* acc) {
  for (int b = 0; b < 2; ++b) {
    const int8_t* w = b == 0 ? w0 : w1;
    __m256i lo[R], hi[R];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) lo[r] = hi[r] = _mm256_setzero_si256();
    for (int64_t p = 0; p < pairs; ++p) {
      const __m128i* line = reinterpret_cast<const __m128i*>(w + p * kPanel);
      const __m256i wl = _mm256_cvtepi8_epi16(_mm_loadu_si128(line));
      const __m256i wh = _mm256_cvtepi8_epi16(_mm_loadu_si128(line + 1));
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const __m256i v = _mm256_set1_epi32(x[p * R + r]);
        lo[r] = _mm256_add_epi32(lo[r], _mm256_madd_epi16(wl, v));
        hi[r] = _mm256_add_epi32(hi[r], _mm256_madd_epi16(wh, v));
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      __m256i* out = reinterpret_cast<__m256i*>(acc + r * kPanel + b * kBlock);
      _mm256_storeu_si256(out, lo[r]);
      _mm256_storeu_si256(out + 1, hi[r]);
    }
  }
}

#define TILE_512(NAME, TARGET, DOT)                                                                        \
  template <int R>                                                                                         \
  __attribute__((target(TARGET))) void NAME(const int32_t* x, const int8_t* w0, const int8_t* w1,          \
                                            int64_t pairs, int32_t* acc) {                                 \
    __m512i a[R], b[R];                                                                                    \
    _Pragma("GCC unroll 6") for (int r = 0; r < R; ++r) a[r] = b[r] = _mm512_setzero_si512();              \
    for (int64_t p = 0; p < pairs; ++p) {                                                                  \
      const __m512i va =                                                                                   \
          _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w0 + p * kPanel)));     \
      const __m512i vb =                                                                                   \
          _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w1 + p * kPanel)));     \
      _Pragma("GCC unroll 6") for (int r = 0; r < R; ++r) {                                                \
        const __m512i v = _mm512_set1_epi32(x[p * R + r]);                                                 \
        a[r] = DOT(a[r], va, v);                                                                           \
        b[r] = DOT(b[r], vb, v);                                                                           \
      }                                                                                                    \
    }                                                                                                      \
    _Pragma("GCC unroll 6") for (int r = 0; r < R; ++r) {                                                  \
      _mm512_storeu_si512(acc + r * kPanel, a[r]);                                                         \
      _mm512_storeu_si512(acc + r * kPanel + kBlock, b[r]);                                                \
    }                                                                                                      \
  }

#define DOT_BW(acc, w, v) _mm512_add_epi32(acc, _mm512_madd_epi16(w, v))
#define DOT_VNNI(acc, w, v) _mm512_dpwssd_epi32(acc, w, v)
TILE_512(tile_avx512, "avx512f,avx512bw", DOT_BW)
TILE_512(tile_vnni, "avx512f,avx512bw,avx512vnni", DOT_VNNI)
#endif

#define TILES(NAME) {NAME<1>, NAME<2>, NAME<3>, NAME<4>, NAME<5>, NAME<6>}

enum Isa { kPlain, kAvx2, kAvx512, kVnni, kIsas };

bool runs_here(int isa) {
#if defined(__x86_64__)
  if (isa == kAvx2) return __builtin_cpu_supports("avx2");
  if (isa == kAvx512) return __builtin_cpu_supports("avx512bw");
  if (isa == kVnni) return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vnni");
#endif
  return isa == kPlain;
}

const TileFn* tiles_of(int isa) {
  static const TileFn plain[kRows] = TILES(tile_plain);
#if defined(__x86_64__)
  static const TileFn avx2[kRows] = TILES(tile_avx2);
  static const TileFn avx512[kRows] = TILES(tile_avx512);
  static const TileFn vnni[kRows] = TILES(tile_vnni);
  if (isa == kAvx2) return avx2;
  if (isa == kAvx512) return avx512;
  if (isa == kVnni) return vnni;
#endif
  return plain;
}

// ---- float parts, one row at a time ----------------------------------------------------------------------

// Quantizes x[0, k) into out (k rounded up to even) and returns the scale. A row that holds NaN or infinity
// gets a scale that is not finite, so its outputs are not finite either.
CLONES float quantize_row(const float* x, int64_t k, int16_t* out) {
  int32_t largest = 0;  // the order of the bit patterns of non-negative floats is that of the floats
  for (int64_t i = 0; i < k; ++i) {
    int32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    largest = std::max(largest, bits & 0x7fffffff);
  }
  float amax;
  std::memcpy(&amax, &largest, sizeof amax);
  if (amax < 1e-30f) amax = 1e-30f;  // a row of zeros; the inverse below must stay finite
  const float inverse = static_cast<float>(kLevels) / amax;
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer
  for (int64_t i = 0; i < k; ++i) {
    const float rounded = x[i] * inverse + magic;
    int32_t bits;
    std::memcpy(&bits, &rounded, sizeof bits);
    out[i] = static_cast<int16_t>(bits);
  }
  if (k % 2) out[k] = 0;
  return amax / static_cast<float>(kLevels);
}

// h[i] = silu(gate) * up. exp() is the Cephes polynomial: 2 ulp, and the compiler can vectorise it.
CLONES void swiglu(const float* gate, const float* up, int n, float* h) {
  for (int i = 0; i < n; ++i) {
    const float g = gate[i];
    float z = -g;
    z = z > 88.0f ? 88.0f : z;
    z = z < -87.0f ? -87.0f : z;
    const float shifted = z * 1.44269504088896341f + 12582912.0f;
    int32_t power;
    std::memcpy(&power, &shifted, sizeof power);
    const float whole = shifted - 12582912.0f;
    const float r = z - whole * 0.693359375f - whole * -2.12194440e-4f;
    float poly = 1.9875691500e-4f;
    poly = poly * r + 1.3981999507e-3f;
    poly = poly * r + 8.3334519073e-3f;
    poly = poly * r + 4.1665795894e-2f;
    poly = poly * r + 1.6666665459e-1f;
    poly = poly * r + 5.0000001201e-1f;
    poly = poly * r * r + r + 1.0f;
    const int32_t bits = static_cast<int32_t>((static_cast<uint32_t>(power) + 127u) << 23);
    float scale;
    std::memcpy(&scale, &bits, sizeof scale);
    h[i] = g / (1.0f + poly * scale) * up[i];
  }
}

CLONES void scale_row(const float* acc, const float* channel, float row, int n, float* out) {
  for (int i = 0; i < n; ++i) out[i] = acc[i] * channel[i] * row;
}

CLONES void add_scaled(const float* x, float weight, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] += weight * x[i];
}

CLONES void to_float(const int32_t* acc, int n, bool first, float* out) {
  if (first)
    for (int i = 0; i < n; ++i) out[i] = static_cast<float>(acc[i]);
  else
    for (int i = 0; i < n; ++i) out[i] += static_cast<float>(acc[i]);
}

// ---- shared by both entry points -------------------------------------------------------------------------

struct Tile {
  int64_t first;  // index of its first row
  int rows;
};

// Quantizes a tile's rows (row r of the tile is at row_at(first + r)) into [pairs][rows] order.
template <class RowAt>
void pack_tile(const Tile& tile, int64_t k, RowAt row_at, int32_t* packed, float* scales) {
  const int64_t pairs = (k + 1) / 2;
  std::vector<int16_t> line(2 * pairs);
  for (int r = 0; r < tile.rows; ++r) {
    scales[tile.first + r] = quantize_row(row_at(tile.first + r), k, line.data());
    for (int64_t p = 0; p < pairs; ++p)
      std::memcpy(packed + p * tile.rows + r, &line[2 * p], sizeof(int32_t));
  }
}

// sums[rows][32] = the panel's products with a packed tile, before scales.
void panel_product(const TileFn* tiles, const Tile& tile, const int32_t* packed, const int8_t* panel,
                   int64_t pairs, float* sums) {
  alignas(64) int32_t acc[kRows * kPanel];
  const int8_t* second = panel + pairs * kPanel;
  for (int64_t p = 0; p < pairs; p += kChunk) {
    const int64_t n = std::min(kChunk, pairs - p);
    tiles[tile.rows - 1](packed + p * tile.rows, panel + p * kPanel, second + p * kPanel, n, acc);
    to_float(acc, tile.rows * kPanel, p == 0, sums);
  }
}

// An expert with work and its range of tiles.
struct Group {
  int64_t expert, first, last;
};

// Choices (token, rank) sorted by expert, in tiles that never span two experts.
struct Routing {
  std::vector<int64_t> source;  // index of the choice that a row holds
  std::vector<int64_t> place;   // row of a choice, -1 for none
  std::vector<Tile> tiles;
  std::vector<Group> groups;
};

Routing sort_by_expert(const int32_t* ids, int64_t choices, int64_t experts) {
  std::vector<int64_t> starts(experts + 1, 0);
  for (int64_t i = 0; i < choices; ++i)
    if (ids[i] >= 0) ++starts[ids[i] + 1];
  for (int64_t i = 0; i < experts; ++i) starts[i + 1] += starts[i];

  Routing route;
  route.source.resize(starts[experts]);
  route.place.assign(choices, -1);
  std::vector<int64_t> next(starts.begin(), starts.end() - 1);
  for (int64_t i = 0; i < choices; ++i)
    if (ids[i] >= 0) {
      route.place[i] = next[ids[i]]++;
      route.source[route.place[i]] = i;
    }
  for (int64_t i = 0; i < experts; ++i) {
    if (starts[i] == starts[i + 1]) continue;
    const int64_t first = static_cast<int64_t>(route.tiles.size());
    for (int64_t row = starts[i]; row < starts[i + 1]; row += kRows)
      route.tiles.push_back({row, static_cast<int>(std::min<int64_t>(kRows, starts[i + 1] - row))});
    route.groups.push_back({i, first, static_cast<int64_t>(route.tiles.size())});
  }
  return route;
}

int64_t panels_of(int64_t n) { return (n + kPanel - 1) / kPanel; }

}  // namespace

extern "C" {

// 1 when instruction set `isa` (0 plain, 1 AVX2, 2 AVX-512, 3 AVX-512 VNNI) runs on this CPU.
int ratchet_int8_isa_supported(int isa) { return isa >= 0 && isa < kIsas && runs_here(isa) ? 1 : 0; }

// y[m, n] = x[m, k] @ w[n, k].T + bias[n] (bias may be null). w: [panels][2][pairs][16][2], scales: [n].
void ratchet_int8_linear(int isa, const float* x, int64_t m, int64_t k, const int8_t* w, const float* scales,
                         const float* bias, int64_t n, float* y) {
  const TileFn* tiles = tiles_of(isa);
  const int64_t pairs = (k + 1) / 2, panels = panels_of(n), count = (m + kRows - 1) / kRows;
  std::vector<int32_t> packed(m * pairs);
  std::vector<float> row_scales(m);
  const auto tile_at = [&](int64_t t) {
    return Tile{t * kRows, static_cast<int>(std::min<int64_t>(kRows, m - t * kRows))};
  };
  const auto pack = [&](int64_t t) {
    const Tile tile = tile_at(t);
    pack_tile(tile, k, [&](int64_t i) { return x + i * k; }, &packed[tile.first * pairs], row_scales.data());
  };
  if (m <= kFew)
    for (int64_t t = 0; t < count; ++t) pack(t);
#pragma omp parallel
  {
    if (m > kFew) {
#pragma omp for schedule(static)
      for (int64_t t = 0; t < count; ++t) pack(t);
    }
#pragma omp for schedule(dynamic, 2)
    for (int64_t j = 0; j < panels; ++j) {
      alignas(64) float sums[kRows * kPanel];
      const int width = static_cast<int>(std::min<int64_t>(kPanel, n - j * kPanel));
      for (int64_t t = 0; t < count; ++t) {
        const Tile tile = tile_at(t);
        panel_product(tiles, tile, &packed[tile.first * pairs], w + j * pairs * 2 * kPanel, pairs, sums);
        for (int r = 0; r < tile.rows; ++r) {
          float* out = y + (tile.first + r) * n + j * kPanel;
          scale_row(sums + r * kPanel, scales + j * kPanel, row_scales[tile.first + r], width, out);
          if (bias) add_scaled(bias + j * kPanel, 1.0f, width, out);
        }
      }
    }
  }
}

struct Experts {
  const int8_t* w13;   // [experts][intermediate / 16][gate, up][pairs of hidden][16][2]
  const float* s13;    // [experts][2][intermediate], gate then up; intermediate is a multiple of 16
  const int8_t* w2;    // [experts][panels of hidden][2][pairs of intermediate][16][2]
  const float* s2;     // [experts][hidden]
  int64_t experts, hidden, intermediate;
};

// out[t] = sum over choices c of weights[t, c] * expert[ids[t, c]](x[t]), added in the order of choices;
// a negative id contributes nothing. Returns 0, or 1 without touching out when an id names no expert.
int ratchet_int8_experts(int isa, const Experts* e, const float* x, int64_t tokens, const int32_t* ids,
                         const float* weights, int64_t top_k, float* out) {
  for (int64_t i = 0; i < tokens * top_k; ++i)
    if (ids[i] >= e->experts) return 1;
  const TileFn* tiles = tiles_of(isa);
  const int64_t hidden = e->hidden, inter = e->intermediate;
  const int64_t pairs1 = (hidden + 1) / 2, pairs2 = inter / 2;
  const int64_t blocks = inter / kBlock, panels = panels_of(hidden);

  const Routing route = sort_by_expert(ids, tokens * top_k, e->experts);
  const std::vector<Tile>& work = route.tiles;
  const std::vector<Group>& groups = route.groups;
  const int64_t rows = static_cast<int64_t>(route.source.size()), count = static_cast<int64_t>(work.size());
  const bool few = rows <= kFew;
  std::vector<int32_t> packed1(rows * pairs1), packed2(few ? 0 : rows * pairs2);
  std::vector<float> scales1(rows), scales2(few ? 0 : rows), h(rows * inter), y(rows * hidden);
  const auto pack1 = [&](int64_t t) {
    pack_tile(work[t], hidden, [&](int64_t row) { return x + route.source[row] / top_k * hidden; },
              &packed1[work[t].first * pairs1], scales1.data());
  };
  const auto pack2 = [&](int64_t t, int32_t* packed, float* scales) {
    pack_tile(work[t], inter, [&](int64_t row) { return &h[row * inter]; },
              packed + work[t].first * pairs2, scales);
  };
  const auto combine = [&](int64_t t) {
    std::fill(out + t * hidden, out + (t + 1) * hidden, 0.0f);
    for (int64_t c = 0; c < top_k; ++c) {
      const int64_t row = route.place[t * top_k + c];
      if (row >= 0) add_scaled(&y[row * hidden], weights[t * top_k + c], hidden, out + t * hidden);
    }
  };
  if (few)
    for (int64_t t = 0; t < count; ++t) pack1(t);
#pragma omp parallel
  {
    if (!few) {
#pragma omp for schedule(static)
      for (int64_t t = 0; t < count; ++t) pack1(t);
    }

#pragma omp for schedule(dynamic, 2)
    for (int64_t task = 0; task < static_cast<int64_t>(groups.size()) * blocks; ++task) {
      const Group& group = groups[task / blocks];
      const int64_t j = task % blocks;
      const int8_t* panel = e->w13 + (group.expert * blocks + j) * pairs1 * 2 * kPanel;
      const float* gate_scale = e->s13 + group.expert * 2 * inter + j * kBlock;
      alignas(64) float sums[kRows * kPanel], gate[kBlock], up[kBlock];
      for (int64_t t = group.first; t < group.last; ++t) {
        panel_product(tiles, work[t], &packed1[work[t].first * pairs1], panel, pairs1, sums);
        for (int r = 0; r < work[t].rows; ++r) {
          const int64_t row = work[t].first + r;
          scale_row(sums + r * kPanel, gate_scale, scales1[row], kBlock, gate);
          scale_row(sums + r * kPanel + kBlock, gate_scale + inter, scales1[row], kBlock, up);
          swiglu(gate, up, kBlock, &h[row * inter + j * kBlock]);
        }
      }
    }

    // With few rows every thread quantizes all of them for itself, which costs less than another barrier.
    std::vector<int32_t> own_packed(few ? rows * pairs2 : 0);
    std::vector<float> own_scales(few ? rows : 0);
    const int32_t* h_packed = few ? own_packed.data() : packed2.data();
    const float* h_scales = few ? own_scales.data() : scales2.data();
    if (few) {
      for (int64_t t = 0; t < count; ++t) pack2(t, own_packed.data(), own_scales.data());
    } else {
#pragma omp for schedule(static)
      for (int64_t t = 0; t < count; ++t) pack2(t, packed2.data(), scales2.data());
    }

#pragma omp for schedule(dynamic, 2)
    for (int64_t task = 0; task < static_cast<int64_t>(groups.size()) * panels; ++task) {
      const Group& group = groups[task / panels];
      const int64_t j = task % panels;
      const int8_t* panel = e->w2 + (group.expert * panels + j) * pairs2 * 2 * kPanel;
      const int width = static_cast<int>(std::min<int64_t>(kPanel, hidden - j * kPanel));
      alignas(64) float sums[kRows * kPanel];
      for (int64_t t = group.first; t < group.last; ++t) {
        panel_product(tiles, work[t], h_packed + work[t].first * pairs2, panel, pairs2, sums);
        for (int r = 0; r < work[t].rows; ++r) {
          const int64_t row = work[t].first + r;
          scale_row(sums + r * kPanel, e->s2 + group.expert * hidden + j * kPanel, h_scales[row], width,
                    &y[row * hidden + j * kPanel]);
        }
      }
    }

    if (!few) {
#pragma omp for schedule(static)
      for (int64_t t = 0; t < tokens; ++t) combine(t);
    }
  }
  if (few)
    for (int64_t t = 0; t < tokens; ++t) combine(t);
  return 0;
}

}  // extern "C"
