// Products of float32 activations with int8 weights: linear layers, and all experts of a layer at once.
//
// Weights are int8 in groups of 32 inputs, each group of a channel with a scale and an offset:
// w = scale * q + offset. Activations are quantized here, per row, to 16 bits (largest magnitude -> 32767),
// an error far below that of the weights. Inside a group the int16 x int8 products are added exactly; groups are
// added in float32, in order, with fused multiply-adds. The result of a row therefore does not depend on the
// other rows of the batch, on the number of threads or on the instruction set (AVX2, AVX-512, VNNI, plain
// C++). The compiler may not contract other float operations, for the same reason (build flag).
//
// Layout of weights: panels of 32 output channels, each two blocks of 16; a block is [K/2][16][2] bytes, so
// one vector load holds two consecutive k for each of its channels, as the multiply-add of int16 pairs wants.
// Its scales and offsets are [K/32][scale, offset][16] floats. An expert's gate/up matrix has 16 gate and
// the matching 16 up channels in one panel. K is padded to whole groups. Layout of quantized activations:
// tiles of up to 6 rows, [K/2][rows] pairs of int16, and [K/32][rows] sums of the groups.

#include <algorithm>
#include <cmath>
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
constexpr int kGroup = 32;          // inputs that share a scale and an offset
constexpr int kPairs = kGroup / 2;
constexpr int kLevels = 32767;      // largest quantized activation
constexpr int64_t kFew = 16;        // rows up to which waiting for other threads costs more than their help

// One block's weights, [groups][kPairs][16][2], and its scales, [groups][scale, offset][16].
struct Block {
  const int8_t* q;
  const float* scales;
};

// A packed tile of activations: [groups][kPairs][rows] pairs and [groups][rows] sums.
struct Packed {
  const int32_t* pairs;
  const float* sums;
};

using TileFn = void (*)(Packed x, Block a, Block b, int64_t groups, float* out);

// ---- tiles: out[row][32] = products of the tile with a panel's two blocks, before the rows' scales --------

template <int R>
void tile_plain(Packed x, Block a, Block b, int64_t groups, float* out) {
  std::fill(out, out + R * kPanel, 0.0f);
  for (int64_t g = 0; g < groups; ++g)
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < kPanel; ++n) {
        const Block& block = n < kBlock ? a : b;
        const int8_t* q = block.q + g * kPairs * kPanel + n % kBlock * 2;
        const float* scales = block.scales + g * kPanel + n % kBlock;
        int32_t sum = 0;
        for (int p = 0; p < kPairs; ++p) {
          int16_t pair[2];
          std::memcpy(pair, x.pairs + (g * kPairs + p) * R + r, sizeof pair);
          sum += pair[0] * q[p * kPanel] + pair[1] * q[p * kPanel + 1];
        }
        float& total = out[r * kPanel + n];
        total = std::fmaf(static_cast<float>(sum), scales[0], total);
        total = std::fmaf(x.sums[g * R + r], scales[kBlock], total);
      }
}

#if defined(__x86_64__)
template <int R>
__attribute__((target("avx2,fma"))) void tile_avx2(Packed x, Block a, Block b, int64_t groups, float* out) {
  for (int half = 0; half < 2; ++half) {
    const Block& block = half == 0 ? a : b;
    for (int r = 0; r < R; ++r) std::fill_n(out + r * kPanel + half * kBlock, kBlock, 0.0f);
    for (int64_t g = 0; g < groups; ++g) {
      __m256i lo[R], hi[R];
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) lo[r] = hi[r] = _mm256_setzero_si256();
      const int32_t* pairs = x.pairs + g * kPairs * R;
      const __m128i* line = reinterpret_cast<const __m128i*>(block.q + g * kPairs * kPanel);
      for (int p = 0; p < kPairs; ++p) {
        const __m256i wl = _mm256_cvtepi8_epi16(_mm_loadu_si128(line + 2 * p));
        const __m256i wh = _mm256_cvtepi8_epi16(_mm_loadu_si128(line + 2 * p + 1));
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
          const __m256i v = _mm256_set1_epi32(pairs[p * R + r]);
          lo[r] = _mm256_add_epi32(lo[r], _mm256_madd_epi16(wl, v));
          hi[r] = _mm256_add_epi32(hi[r], _mm256_madd_epi16(wh, v));
        }
      }
      const float* scales = block.scales + g * kPanel;
      const __m256 sl = _mm256_loadu_ps(scales), sh = _mm256_loadu_ps(scales + 8);
      const __m256 ol = _mm256_loadu_ps(scales + 16), oh = _mm256_loadu_ps(scales + 24);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        float* total = out + r * kPanel + half * kBlock;
        const __m256 sum = _mm256_set1_ps(x.sums[g * R + r]);
        __m256 tl = _mm256_fmadd_ps(_mm256_cvtepi32_ps(lo[r]), sl, _mm256_loadu_ps(total));
        __m256 th = _mm256_fmadd_ps(_mm256_cvtepi32_ps(hi[r]), sh, _mm256_loadu_ps(total + 8));
        _mm256_storeu_ps(total, _mm256_fmadd_ps(sum, ol, tl));
        _mm256_storeu_ps(total + 8, _mm256_fmadd_ps(sum, oh, th));
      }
    }
  }
}

#define TILE_512(NAME, TARGET, DOT)                                                                        \
  template <int R>                                                                                         \
  __attribute__((target(TARGET))) void NAME(Packed x, Block a, Block b, int64_t groups, float* out) {      \
    __m512 ta[R], tb[R];                                                                                   \
    _Pragma("GCC unroll 6") for (int r = 0; r < R; ++r) ta[r] = tb[r] = _mm512_setzero_ps();               \
    for (int64_t g = 0; g < groups; ++g) {                                                                 \
      __m512i ia[R], ib[R];                                                                                \
      _Pragma("GCC unroll 6") for (int r = 0; r < R; ++r) ia[r] = ib[r] = _mm512_setzero_si512();          \
      const int32_t* pairs = x.pairs + g * kPairs * R;                                                     \
      const __m256i* la = reinterpret_cast<const __m256i*>(a.q + g * kPairs * kPanel);                     \
      const __m256i* lb = reinterpret_cast<const __m256i*>(b.q + g * kPairs * kPanel);                     \
      for (int p = 0; p < kPairs; ++p) {                                                                   \
        const __m512i wa = _mm512_cvtepi8_epi16(_mm256_loadu_si256(la + p));                               \
        const __m512i wb = _mm512_cvtepi8_epi16(_mm256_loadu_si256(lb + p));                               \
        _Pragma("GCC unroll 6") for (int r = 0; r < R; ++r) {                                              \
          const __m512i v = _mm512_set1_epi32(pairs[p * R + r]);                                           \
          ia[r] = DOT(ia[r], wa, v);                                                                       \
          ib[r] = DOT(ib[r], wb, v);                                                                       \
        }                                                                                                  \
      }                                                                                                    \
      const __m512 sa = _mm512_loadu_ps(a.scales + g * kPanel);                                            \
      const __m512 sb = _mm512_loadu_ps(b.scales + g * kPanel);                                            \
      const __m512 oa = _mm512_loadu_ps(a.scales + g * kPanel + kBlock);                                   \
      const __m512 ob = _mm512_loadu_ps(b.scales + g * kPanel + kBlock);                                   \
      _Pragma("GCC unroll 6") for (int r = 0; r < R; ++r) {                                                \
        const __m512 sum = _mm512_set1_ps(x.sums[g * R + r]);                                              \
        ta[r] = _mm512_fmadd_ps(sum, oa, _mm512_fmadd_ps(_mm512_cvtepi32_ps(ia[r]), sa, ta[r]));           \
        tb[r] = _mm512_fmadd_ps(sum, ob, _mm512_fmadd_ps(_mm512_cvtepi32_ps(ib[r]), sb, tb[r]));           \
      }                                                                                                    \
    }                                                                                                      \
    _Pragma("GCC unroll 6") for (int r = 0; r < R; ++r) {                                                  \
      _mm512_storeu_ps(out + r * kPanel, ta[r]);                                                           \
      _mm512_storeu_ps(out + r * kPanel + kBlock, tb[r]);                                                  \
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
  if (isa == kAvx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
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

// Quantizes x[0, k) into out, padded with zeros to whole groups, and returns the scale. A row that holds NaN
// or infinity gets a scale that is not finite, so its outputs are not finite either.
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
  constexpr float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer
  for (int64_t i = 0; i < k; ++i) {
    const float rounded = x[i] * inverse + magic;
    int32_t bits;
    std::memcpy(&bits, &rounded, sizeof bits);
    out[i] = static_cast<int16_t>(bits);
  }
  for (int64_t i = k; i % kGroup; ++i) out[i] = 0;
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

CLONES void scale_row(const float* x, float row, int n, float* out) {
  for (int i = 0; i < n; ++i) out[i] = x[i] * row;
}

CLONES void add_scaled(const float* x, float weight, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] += weight * x[i];
}

CLONES void group_sums(const int16_t* x, int64_t groups, int stride, float* out) {
  for (int64_t g = 0; g < groups; ++g) {
    int32_t sum = 0;
    for (int i = 0; i < kGroup; ++i) sum += x[g * kGroup + i];
    out[g * stride] = static_cast<float>(sum);
  }
}

// ---- shared by both entry points -------------------------------------------------------------------------

struct Tile {
  int64_t first;  // index of its first row
  int rows;
};

int64_t groups_of(int64_t k) { return (k + kGroup - 1) / kGroup; }
int64_t panels_of(int64_t n) { return (n + kPanel - 1) / kPanel; }

// Quantized rows of a product, in tiles.
struct Rows {
  Rows(int64_t rows, int64_t k)
      : k(k), groups(groups_of(k)), pairs(rows * groups * kPairs), sums(rows * groups), scales(rows) {}

  int64_t k, groups;
  std::vector<int32_t> pairs;
  std::vector<float> sums, scales;

  Packed at(const Tile& tile) const {
    return {&pairs[tile.first * groups * kPairs], &sums[tile.first * groups]};
  }

  // Quantizes the tile's rows; row_at(first + r) is where its row r lies.
  template <class RowAt>
  void pack(const Tile& tile, RowAt row_at) {
    std::vector<int16_t> line(groups * kGroup);
    int32_t* out = &pairs[tile.first * groups * kPairs];
    for (int r = 0; r < tile.rows; ++r) {
      scales[tile.first + r] = quantize_row(row_at(tile.first + r), k, line.data());
      group_sums(line.data(), groups, tile.rows, &sums[tile.first * groups + r]);
      for (int64_t p = 0; p < groups * kPairs; ++p)
        std::memcpy(out + p * tile.rows + r, &line[2 * p], sizeof(int32_t));
    }
  }
};

// A matrix in panels: weights [panels][2][groups][kPairs][16][2], scales [panels][2][groups][2][16].
struct Matrix {
  const int8_t* q;
  const float* scales;
  int64_t groups;

  // out[rows][32] = the tile times panel j, without the rows' scales.
  void multiply(const TileFn* tiles, const Tile& tile, const Rows& rows, int64_t j, float* out) const {
    const int64_t step = groups * kPairs * kPanel, scale_step = groups * kPanel;
    const Block a{q + 2 * j * step, scales + 2 * j * scale_step};
    tiles[tile.rows - 1](rows.at(tile), a, {a.q + step, a.scales + scale_step}, groups, out);
  }
};

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

}  // namespace

extern "C" {

// 1 when instruction set `isa` (0 plain, 1 AVX2, 2 AVX-512, 3 AVX-512 VNNI) runs on this CPU.
int ratchet_int8_isa_supported(int isa) { return isa >= 0 && isa < kIsas && runs_here(isa) ? 1 : 0; }

// y[m, n] = x[m, k] @ w[n, k].T + bias[n] (bias may be null).
void ratchet_int8_linear(int isa, const float* x, int64_t m, int64_t k, const int8_t* q, const float* scales,
                         const float* bias, int64_t n, float* y) {
  const TileFn* tiles = tiles_of(isa);
  const int64_t count = (m + kRows - 1) / kRows;
  const Matrix weights{q, scales, groups_of(k)};
  Rows rows(m, k);
  const auto tile_at = [&](int64_t t) {
    return Tile{t * kRows, static_cast<int>(std::min<int64_t>(kRows, m - t * kRows))};
  };
  const auto pack = [&](int64_t t) { rows.pack(tile_at(t), [&](int64_t i) { return x + i * k; }); };
  if (m <= kFew)
    for (int64_t t = 0; t < count; ++t) pack(t);
#pragma omp parallel
  {
    if (m > kFew) {
#pragma omp for schedule(static)
      for (int64_t t = 0; t < count; ++t) pack(t);
    }
#pragma omp for schedule(dynamic, 2)
    for (int64_t j = 0; j < panels_of(n); ++j) {
      alignas(64) float products[kRows * kPanel];
      const int width = static_cast<int>(std::min<int64_t>(kPanel, n - j * kPanel));
      for (int64_t t = 0; t < count; ++t) {
        const Tile tile = tile_at(t);
        weights.multiply(tiles, tile, rows, j, products);
        for (int r = 0; r < tile.rows; ++r) {
          float* out = y + (tile.first + r) * n + j * kPanel;
          scale_row(products + r * kPanel, rows.scales[tile.first + r], width, out);
          if (bias) add_scaled(bias + j * kPanel, 1.0f, width, out);
        }
      }
    }
  }
}

struct Experts {
  const int8_t* q13;   // a matrix an expert, inter / 16 panels of 16 gates and their 16 ups
  const float* s13;
  const int8_t* q2;    // a matrix an expert, panels of hidden
  const float* s2;
  int64_t experts, hidden, inter;  // inter: a multiple of 16
};

// out[t] = sum over choices c of weights[t, c] * expert[ids[t, c]](x[t]), added in the order of choices;
// a negative id contributes nothing. Returns 0, or 1 without touching out when an id names no expert.
int ratchet_int8_experts(int isa, const Experts* e, const float* x, int64_t tokens, const int32_t* ids,
                         const float* weights, int64_t top_k, float* out) {
  for (int64_t i = 0; i < tokens * top_k; ++i)
    if (ids[i] >= e->experts) return 1;
  const TileFn* tiles = tiles_of(isa);
  const int64_t hidden = e->hidden, inter = e->inter;
  const int64_t groups1 = groups_of(hidden), groups2 = groups_of(inter);
  const int64_t panels1 = inter / kBlock, panels2 = panels_of(hidden);
  const auto up_of = [&](int64_t expert) {
    const int64_t step = expert * panels1 * 2 * groups1 * kPanel;
    return Matrix{e->q13 + step * kPairs, e->s13 + step, groups1};
  };
  const auto down_of = [&](int64_t expert) {
    const int64_t step = expert * panels2 * 2 * groups2 * kPanel;
    return Matrix{e->q2 + step * kPairs, e->s2 + step, groups2};
  };

  const Routing route = sort_by_expert(ids, tokens * top_k, e->experts);
  const std::vector<Tile>& work = route.tiles;
  const std::vector<Group>& active = route.groups;
  const int64_t rows = static_cast<int64_t>(route.source.size()), count = static_cast<int64_t>(work.size());
  const int64_t tasks1 = static_cast<int64_t>(active.size()) * panels1;
  const int64_t tasks2 = static_cast<int64_t>(active.size()) * panels2;
  const bool few = rows <= kFew;
  Rows inputs(rows, hidden), shared(few ? 0 : rows, inter);
  std::vector<float> h(rows * inter), y(rows * hidden);
  const auto pack_input = [&](int64_t t) {
    inputs.pack(work[t], [&](int64_t row) { return x + route.source[row] / top_k * hidden; });
  };
  const auto pack_h = [&](int64_t t, Rows& to) {
    to.pack(work[t], [&](int64_t row) { return &h[row * inter]; });
  };
  const auto combine = [&](int64_t t) {
    std::fill(out + t * hidden, out + (t + 1) * hidden, 0.0f);
    for (int64_t c = 0; c < top_k; ++c) {
      const int64_t row = route.place[t * top_k + c];
      if (row >= 0) add_scaled(&y[row * hidden], weights[t * top_k + c], hidden, out + t * hidden);
    }
  };
  if (few)
    for (int64_t t = 0; t < count; ++t) pack_input(t);
#pragma omp parallel
  {
    if (!few) {
#pragma omp for schedule(static)
      for (int64_t t = 0; t < count; ++t) pack_input(t);
    }

#pragma omp for schedule(dynamic, 2)
    for (int64_t task = 0; task < tasks1; ++task) {
      const Group& group = active[task / panels1];
      const int64_t j = task % panels1;
      const Matrix matrix = up_of(group.expert);
      alignas(64) float products[kRows * kPanel], both[kPanel];
      for (int64_t t = group.first; t < group.last; ++t) {
        matrix.multiply(tiles, work[t], inputs, j, products);
        for (int r = 0; r < work[t].rows; ++r) {
          const int64_t row = work[t].first + r;
          scale_row(products + r * kPanel, inputs.scales[row], kPanel, both);
          swiglu(both, both + kBlock, kBlock, &h[row * inter + j * kBlock]);
        }
      }
    }

    // With few rows every thread quantizes all of them for itself, which costs less than another barrier.
    Rows own(few ? rows : 0, inter);
    if (few) {
      for (int64_t t = 0; t < count; ++t) pack_h(t, own);
    } else {
#pragma omp for schedule(static)
      for (int64_t t = 0; t < count; ++t) pack_h(t, shared);
    }
    const Rows& middle = few ? own : shared;

#pragma omp for schedule(dynamic, 2)
    for (int64_t task = 0; task < tasks2; ++task) {
      const Group& group = active[task / panels2];
      const int64_t j = task % panels2;
      const Matrix matrix = down_of(group.expert);
      const int width = static_cast<int>(std::min<int64_t>(kPanel, hidden - j * kPanel));
      alignas(64) float products[kRows * kPanel];
      for (int64_t t = group.first; t < group.last; ++t) {
        matrix.multiply(tiles, work[t], middle, j, products);
        for (int r = 0; r < work[t].rows; ++r) {
          const int64_t row = work[t].first + r;
          scale_row(products + r * kPanel, middle.scales[row], width, &y[row * hidden + j * kPanel]);
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
