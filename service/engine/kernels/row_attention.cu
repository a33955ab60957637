// A block of 8 warps computes 16 queries of one row and one head of keys and values, and a chunk of VC dimensions of their values.
// It covers all of the row's keys or, with SPLIT, one share of them: of n shares, every n-th 128 keys. Keys and values are in pages
// of PAGE positions, a multiple of 16, whose numbers are in the row of `page_table`. They may have any layout in which their
// dimensions are contiguous. Constants: T (bfloat16 or float16), HALF (T is float16), D and V (dimensions of keys and values), VC,
// G (query heads that share a head of keys), WINDOW (0: none), SINKS.
//
// Each warp takes 16 keys at a time: scores by mma.m16n8k16 into two tiles of 8 keys, then their weights times 16 values. The order
// of dimensions in a fragment is arbitrary as long as both factors agree. A thread takes neighbouring ones, so that it reads keys
// and values in words of up to 16 bytes directly into its registers.
constexpr int WARPS = 8, STEPS = D / 16, DT = D / 4, VT = VC / 8;
constexpr float LOG2E = 1.4426950408889634f;
const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q = lane & 3;
const int heads = keys_shape[1], N = queries_shape[1], M = G * N, W = page_table_shape[1];
const int b = blockIdx.x / heads, h = blockIdx.x % heads;
const int m0 = (blockIdx.z / (V / VC)) * 16, v0 = (blockIdx.z % (V / VC)) * VC;
const int start = starts[b], total = start + N;

// Queries g and g + 8 of the block: 4 neighbouring dimensions of each per step.
const int first = min(m0 + g, M - 1), second = min(m0 + g + 8, M - 1);
const T* query = queries + ((int64_t)b * N * heads + h) * G * D + q * DT;
uint2 q0[STEPS], q1[STEPS];
load<STEPS>(q0, query + ((int64_t)(first / G) * heads * G + first % G) * D);
load<STEPS>(q1, query + ((int64_t)(second / G) * heads * G + second % G) * D);
const int at0 = start + first / G, at1 = start + second / G;

float acc[VT][4], top0 = -INFINITY, top1 = -INFINITY, sum0 = 0.0f, sum1 = 0.0f;
#pragma unroll
for (int j = 0; j < VT; j++) { acc[j][0] = acc[j][1] = acc[j][2] = acc[j][3] = 0.0f; }
const T* keys_of = keys + h * keys_strides[1] + q * DT;
const T* values_of = values + h * values_strides[1] + v0 + g * VT;
const int* pages = page_table + b * W;
const float factor = scale[0] * LOG2E;
const int begin = (WINDOW > 0 && start + 1 > WINDOW) ? (start + 1 - WINDOW) / 16 : 0;

#if SPLIT
// A row has as many shares of `least` keys as it fills, up to gridDim.y. The merge reads only the tops of the other shares.
const int shares = min((total - begin * 16 + least[0] - 1) / least[0], static_cast<int>(gridDim.y));
if (blockIdx.y >= shares) {
  for (int m = m0 + threadIdx.x; v0 == 0 && m < min(m0 + 16, M); m += WARPS * 32) {
    const int64_t row = ((int64_t)b * N + m / G) * heads * G + h * G + m % G;
    tops[row * gridDim.y + blockIdx.y] = -INFINITY;
  }
  return;
}
#else
const int shares = 1;
#endif

// While a tile is computed, the next one's keys and values are read into registers that this one no longer needs, together with
// the page number of the tile after that.
const int step = shares * WARPS;
uint2 k0[STEPS], k1[STEPS];
uint32_t u[4][VT / 2];
const auto read_keys = [&](int base, int page) {
  const int slot = base % PAGE, last = total - 1 - base + slot;
  const T* from = keys_of + page * keys_strides[0];
  load<STEPS>(k0, from + min(slot + g, last) * keys_strides[2]);
  load<STEPS>(k1, from + min(slot + g + 8, last) * keys_strides[2]);
};
const auto read_values = [&](int base, int page) {
  const int slot = base % PAGE, last = total - 1 - base + slot;
  const T* from = values_of + page * values_strides[0];
  #pragma unroll
  for (int i = 0; i < 4; i++) {
    load<VT / 2>(u[i], from + min(slot + 2 * q + i % 2 + 8 * (i / 2), last) * values_strides[2]);
  }
};
int tile = begin + blockIdx.y * WARPS + warp;
int page = pages[min(tile * 16 / PAGE, W - 1)], page_after = pages[min((tile + step) * 16 / PAGE, W - 1)];
if (tile * 16 < total) {
  read_keys(tile * 16, page);
  read_values(tile * 16, page);
}
for (; tile * 16 < total; tile += step) {
  const int base = tile * 16, base_after = base + step * 16;
  page = page_after;
  page_after = pages[min((tile + 2 * step) * 16 / PAGE, W - 1)];
  float s[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
  #pragma unroll
  for (int i = 0; i < STEPS; i++) {
    multiply<HALF>(s[0], q0[i].x, q1[i].x, q0[i].y, q1[i].y, k0[i].x, k0[i].y);
    multiply<HALF>(s[1], q0[i].x, q1[i].x, q0[i].y, q1[i].y, k1[i].x, k1[i].y);
  }
  if (base_after < total) { read_keys(base_after, page); }
  float most0 = -INFINITY, most1 = -INFINITY;
  #pragma unroll
  for (int i = 0; i < 4; i++) {
    const int key = base + 8 * (i / 2) + 2 * q + i % 2;
    const bool sees0 = key <= at0 && (WINDOW == 0 || key + WINDOW > at0);
    const bool sees1 = key <= at1 && (WINDOW == 0 || key + WINDOW > at1);
    s[i / 2][i % 2] = sees0 ? s[i / 2][i % 2] * factor : -INFINITY;
    s[i / 2][i % 2 + 2] = sees1 ? s[i / 2][i % 2 + 2] * factor : -INFINITY;
    most0 = fmaxf(most0, s[i / 2][i % 2]);
    most1 = fmaxf(most1, s[i / 2][i % 2 + 2]);
  }
  #pragma unroll
  for (int o = 1; o < 4; o *= 2) {
    most0 = fmaxf(most0, __shfl_xor_sync(0xffffffff, most0, o));
    most1 = fmaxf(most1, __shfl_xor_sync(0xffffffff, most1, o));
  }
  most0 = fmaxf(most0, top0);
  most1 = fmaxf(most1, top1);
  const float above0 = most0 == -INFINITY ? 0.0f : most0, above1 = most1 == -INFINITY ? 0.0f : most1;
  const float shrink0 = exp2f(top0 - above0), shrink1 = exp2f(top1 - above1);
  top0 = most0;
  top1 = most1;
  #pragma unroll
  for (int i = 0; i < 4; i++) {
    s[i / 2][i % 2] = exp2f(s[i / 2][i % 2] - above0);
    s[i / 2][i % 2 + 2] = exp2f(s[i / 2][i % 2 + 2] - above1);
  }
  sum0 = sum0 * shrink0 + (s[0][0] + s[0][1] + s[1][0] + s[1][1]);
  sum1 = sum1 * shrink1 + (s[0][2] + s[0][3] + s[1][2] + s[1][3]);
  const uint32_t p[4] = {pack<HALF>(s[0][0], s[0][1]), pack<HALF>(s[0][2], s[0][3]), pack<HALF>(s[1][0], s[1][1]),
                         pack<HALF>(s[1][2], s[1][3])};
  #pragma unroll
  for (int j = 0; j < VT; j++) {
    rescale(acc[j], shrink0, shrink1);
    const uint32_t half = j % 2 ? 0x7632 : 0x5410;
    multiply<HALF>(acc[j], p[0], p[1], p[2], p[3], __byte_perm(u[0][j / 2], u[1][j / 2], half),
                   __byte_perm(u[2][j / 2], u[3][j / 2], half));
  }
  if (base_after < total) { read_values(base_after, page); }
}

// The warps' shares, rescaled to one maximum and added in a fixed order, so that the same call always gives the same bits.
__shared__ float tops_of[WARPS][16], added[WARPS / 2][VT * 4 + 2][32];
#pragma unroll
for (int o = 1; o < 4; o *= 2) {
  sum0 += __shfl_xor_sync(0xffffffff, sum0, o);
  sum1 += __shfl_xor_sync(0xffffffff, sum1, o);
}
if (q == 0) {
  tops_of[warp][g] = top0;
  tops_of[warp][g + 8] = top1;
}
__syncthreads();
float sink0 = -INFINITY, sink1 = -INFINITY;
if (SINKS && blockIdx.y == 0) {
  sink0 = LOG2E * static_cast<float>(sinks[h * G + first % G]);
  sink1 = LOG2E * static_cast<float>(sinks[h * G + second % G]);
}
float most0 = sink0, most1 = sink1;
#pragma unroll
for (int w = 0; w < WARPS; w++) {
  most0 = fmaxf(most0, tops_of[w][g]);
  most1 = fmaxf(most1, tops_of[w][g + 8]);
}
const float above0 = most0 == -INFINITY ? 0.0f : most0, above1 = most1 == -INFINITY ? 0.0f : most1;
const float shrink0 = exp2f(top0 - above0), shrink1 = exp2f(top1 - above1);
sum0 *= shrink0;
sum1 *= shrink1;
#pragma unroll
for (int j = 0; j < VT; j++) { rescale(acc[j], shrink0, shrink1); }
#pragma unroll
for (int others = WARPS / 2; others > 0; others /= 2) {
  if (warp >= others && warp < 2 * others) {
    float (*to)[32] = added[warp - others];
    #pragma unroll
    for (int i = 0; i < VT * 4; i++) { to[i][lane] = acc[i / 4][i % 4]; }
    to[VT * 4][lane] = sum0;
    to[VT * 4 + 1][lane] = sum1;
  }
  __syncthreads();
  if (warp < others) {
    float (*from)[32] = added[warp];
    #pragma unroll
    for (int i = 0; i < VT * 4; i++) { acc[i / 4][i % 4] += from[i][lane]; }
    sum0 += from[VT * 4][lane];
    sum1 += from[VT * 4 + 1][lane];
  }
  __syncthreads();
}
if (warp == 0) {
  sum0 += exp2f(sink0 - above0);
  sum1 += exp2f(sink1 - above1);
  #pragma unroll
  for (int i = 0; i < 4; i++) {
    const int m = m0 + g + 8 * (i / 2), dim = v0 + (2 * q + i % 2) * VT;
    if (m < M) {
      const int64_t row = ((int64_t)b * N + m / G) * heads * G + h * G + m % G;
#if SPLIT
      const int64_t part = row * gridDim.y + blockIdx.y;
      #pragma unroll
      for (int j = 0; j < VT; j++) { out[part * V + dim + j] = acc[j][i]; }
      if (dim == 0) {
        sums[part] = i / 2 ? sum1 : sum0;
        tops[part] = i / 2 ? most1 : most0;
      }
#else
      const float share = i / 2 ? (sum1 > 0.0f ? 1.0f / sum1 : 0.0f) : (sum0 > 0.0f ? 1.0f / sum0 : 0.0f);
      #pragma unroll
      for (int j = 0; j < VT; j++) { out[row * V + dim + j] = static_cast<T>(acc[j][i] * share); }
#endif
    }
  }
}
