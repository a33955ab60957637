// Each block multiplies up to 8 TILES tokens by 8 DEEP rows of one of three weight matrices. 8 warps share the inner dimension, 64
// elements at a time, and fetch them STAGES ahead into separate parts of shared memory, so each weight is read once. The order of
// additions depends only on the inner dimension, so a token's product has the same bits whatever else is in the call.
// Constants: T (bfloat16 or float16), HALF (T is float16), TILES, DEEP, STAGES; QUANTISED (4-bit weights, GROUP of which share a
// scale and a bias); RANK of a low-rank product to add, 0 for none: inputs down (RANK rows like those of a weight matrix) and up
// (outputs times RANK). Each block computes x times down again; later blocks read down from the L2 cache.
constexpr int WARPS = 8, ROWS = 8 * DEEP, PAIRS = (TILES + 1) / 2;
#if QUANTISED
// Per row: 8 words of numbers, and the two scales and two biases that include the chunk's.
constexpr int WEIGHTS = ROWS * 5 / 2;
typedef uint32_t Weight;
#else
constexpr int WEIGHTS = ROWS * 8;
typedef T Weight;
#endif
constexpr int STAGE = WEIGHTS + 8 * TILES * 8;
const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q = lane & 3;
const int tokens = x_shape[0], inner = x_shape[1], chunks = inner / 64, pitch = inner / 8;

// Blocks of the first matrix come first, then those of the other matrices in the grid.
const Weight* weight = weight0;
T* out = out0;
int outputs = weight0_shape[0], block = blockIdx.x;
const Weight* other_weights[] = {weight1, weight2};
#if QUANTISED
const T* scales = scales0;
const T* biases = biases0;
const T* other_scales[] = {scales1, scales2};
const T* other_biases[] = {biases1, biases2};
#endif
#if RANK
const T* down = down0;
const T* up = up0;
const T* other_downs[] = {down1, down2};
const T* other_ups[] = {up1, up2};
#endif
T* other_outs[] = {out1, out2};
const int others[] = {weight1_shape[0], weight2_shape[0]};
#pragma unroll
for (int i = 0; i < 2; i++) {
  const int blocks = (outputs + ROWS - 1) / ROWS;
  if (block < blocks) { break; }
  block -= blocks;
  weight = other_weights[i];
#if QUANTISED
  scales = other_scales[i];
  biases = other_biases[i];
#endif
#if RANK
  down = other_downs[i];
  up = other_ups[i];
#endif
  out = other_outs[i];
  outputs = others[i];
}

// A stage is 64 elements of each row of weights, then of tokens. A quarter of a warp reads two rows at once, 64 bytes of each.
// Every other row has its halves exchanged, so that the two are in different banks.
extern __shared__ uint4 memory[];
uint4* ring = memory + warp * STAGES * STAGE;
const int line = lane >> 3, part = lane & 7, to = line * 8 + (part ^ ((line & 1) << 2));
const int valid = min(ROWS, outputs - block * ROWS);
#if QUANTISED
const int groups = inner / GROUP;
const uint4* weights = reinterpret_cast<const uint4*>(weight + ((int64_t)block * ROWS + lane / 2) * (inner / 8)) + lane % 2;
const T* row_scales = scales + (int64_t)block * ROWS * groups;
const T* row_biases = biases + (int64_t)block * ROWS * groups;
#else
const uint4* weights = reinterpret_cast<const uint4*>(weight + ((int64_t)block * ROWS + line) * inner) + part;
#endif
const uint4* inputs = reinterpret_cast<const uint4*>(x + (int64_t)line * inner) + part;
auto fetch = [&](int chunk, int stage) {
  // For missing rows, arbitrary memory contents are multiplied; their outputs are discarded.
  if (chunk < chunks) {
#if QUANTISED
    uint4* numbers = ring + stage * STAGE + lane;
    #pragma unroll
    for (int row = 0; row < ROWS; row += 16) {
      if (row + lane / 2 < valid) { copy_async<true>(numbers + row * 2, weights + (int64_t)row * (inner / 32) + 2 * chunk); }
    }
    uint32_t* pairs = reinterpret_cast<uint32_t*>(ring + stage * STAGE + ROWS * 2);
    const int group = chunk * 64 / GROUP & ~1;
    #pragma unroll
    for (int row = 0; row < ROWS; row += 32) {
      if (row + lane < valid && row + lane < ROWS) {
        copy_async(pairs + 2 * (row + lane), row_scales + (int64_t)(row + lane) * groups + group);
        copy_async(pairs + 2 * (row + lane) + 1, row_biases + (int64_t)(row + lane) * groups + group);
      }
    }
#else
    uint4* rows = ring + stage * STAGE + to;
    #pragma unroll
    for (int row = 0; row < ROWS; row += 4) {
      if (row + line < valid) { copy_async<true>(rows + row * 8, weights + (int64_t)row * pitch + 8 * chunk); }
    }
#endif
    uint4* tokens_of = ring + stage * STAGE + WEIGHTS + to;
    #pragma unroll
    for (int row = 0; row < 8 * TILES; row += 4) {
      if (row + line < tokens) { copy_async<false>(tokens_of + row * 8, inputs + (int64_t)row * pitch + 8 * chunk); }
    }
  }
  copy_async_commit();
};

float acc[DEEP][PAIRS][4];
#pragma unroll
for (int i = 0; i < 4 * DEEP * PAIRS; i++) { acc[i / (4 * PAIRS)][i / 4 % PAIRS][i % 4] = 0.0f; }
#if RANK
float low[RANK / 8][PAIRS][4];
#pragma unroll
for (int i = 0; i < RANK / 2 * PAIRS; i++) { low[i / (4 * PAIRS)][i / 4 % PAIRS][i % 4] = 0.0f; }
up += (int64_t)block * ROWS * RANK;
// Used at the end. Prefetched, because otherwise the first block would wait for memory then.
if (threadIdx.x < valid) { asm volatile("prefetch.global.L2 [%0];" :: "l"(up + threadIdx.x * RANK)); }
#endif
#pragma unroll
for (int stage = 0; stage < STAGES - 1; stage++) { fetch(warp + stage * WARPS, stage); }
const int swap = (g & 1) << 2;
int stage = 0;
for (int chunk = warp; chunk < chunks; chunk += WARPS) {
#if RANK
  uint4 downs[2][RANK / 8];
  #pragma unroll
  for (int i = 0; i < RANK / 4; i++) {
    const int p = i / (RANK / 8), r = i % (RANK / 8);
    downs[p][r] = __ldg(reinterpret_cast<const uint4*>(down + (int64_t)(8 * r + g) * inner + 64 * chunk) + q + 4 * p);
  }
#endif
  copy_async_wait<STAGES - 2>();
  __syncwarp();
  fetch(chunk + (STAGES - 1) * WARPS, stage == 0 ? STAGES - 1 : stage - 1);
  const uint4* at = ring + stage * STAGE + WEIGHTS + g * 8;
#if QUANTISED
  const uint32_t* numbers = reinterpret_cast<const uint32_t*>(ring + stage * STAGE) + g * 8;
  const uint2* pairs = reinterpret_cast<const uint2*>(ring + stage * STAGE + ROWS * 2) + g;
#else
  const uint4* rows = ring + stage * STAGE + g * 8;
#endif
  stage = stage + 1 == STAGES ? 0 : stage + 1;
  #pragma unroll
  for (int p = 0; p < 2; p++) {
    // The order of elements in a fragment is arbitrary as long as weights and tokens agree.
    const int offset = (q + 4 * p) ^ swap;
    uint32_t w[DEEP][4];
    #pragma unroll
    for (int d = 0; d < DEEP; d++) {
#if QUANTISED
      const uint2 pair = pairs[8 * d];
      const uint32_t which = (chunk * 64 + 32 * p) / GROUP & 1 ? 0x3232 : 0x1010;
      widen<HALF>(w[d], numbers[64 * d + q + 4 * p], __byte_perm(pair.x, 0, which), __byte_perm(pair.y, 0, which));
#else
      *reinterpret_cast<uint4*>(w[d]) = rows[64 * d + offset];
#endif
    }
    #pragma unroll
    for (int j = 0; j < PAIRS; j++) {
      uint4 a = at[64 * 2 * j + offset];
      uint4 b = 2 * j + 1 < TILES ? at[64 * (2 * j + 1) + offset] : make_uint4(0, 0, 0, 0);
#if RANK
      #pragma unroll
      for (int r = 0; r < RANK / 8; r++) {
        multiply<HALF>(low[r][j], a.x, b.x, a.y, b.y, downs[p][r].x, downs[p][r].y);
        multiply<HALF>(low[r][j], a.z, b.z, a.w, b.w, downs[p][r].z, downs[p][r].w);
      }
#endif
#if QUANTISED
      a = make_uint4(__byte_perm(a.x, a.z, 0x5410), __byte_perm(a.x, a.z, 0x7632), __byte_perm(a.y, a.w, 0x5410),
                     __byte_perm(a.y, a.w, 0x7632));
      b = make_uint4(__byte_perm(b.x, b.z, 0x5410), __byte_perm(b.x, b.z, 0x7632), __byte_perm(b.y, b.w, 0x5410),
                     __byte_perm(b.y, b.w, 0x7632));
#endif
      #pragma unroll
      for (int d = 0; d < DEEP; d++) {
        multiply<HALF>(acc[d][j], a.x, b.x, a.y, b.y, w[d][0], w[d][1]);
        multiply<HALF>(acc[d][j], a.z, b.z, a.w, b.w, w[d][2], w[d][3]);
      }
    }
  }
}
copy_async_wait<0>();
__syncthreads();

// The warps' sums, in the memory of the ring.
auto shares = reinterpret_cast<float (*)[16 * PAIRS][ROWS + RANK + 1]>(memory);
#pragma unroll
for (int i = 0; i < 4 * DEEP * PAIRS; i++) {
  const int d = i / (4 * PAIRS), j = i / 4 % PAIRS, k = i % 4;
  shares[warp][16 * j + g + 8 * (k / 2)][8 * d + 2 * q + k % 2] = acc[d][j][k];
}
#if RANK
#pragma unroll
for (int i = 0; i < RANK / 2 * PAIRS; i++) {
  const int r = i / (4 * PAIRS), j = i / 4 % PAIRS, k = i % 4;
  shares[warp][16 * j + g + 8 * (k / 2)][ROWS + 8 * r + 2 * q + k % 2] = low[r][j][k];
}
__syncthreads();
for (int i = threadIdx.x; i < tokens * RANK; i += WARPS * 32) {
  float sum = 0.0f;
  #pragma unroll
  for (int w = 0; w < WARPS; w++) { sum += shares[w][i / RANK][ROWS + i % RANK]; }
  shares[0][i / RANK][ROWS + i % RANK] = sum;
}
#endif
__syncthreads();
for (int i = threadIdx.x; i < tokens * ROWS; i += WARPS * 32) {
  const int token = i / ROWS, output = i % ROWS;
  float sum = 0.0f;
  #pragma unroll
  for (int w = 0; w < WARPS; w++) { sum += shares[w][token][output]; }
#if RANK
  if (output < valid) {
    alignas(16) uint32_t factors[RANK / 2];
    load(factors, up + output * RANK);
    #pragma unroll
    for (int r = 0; r < RANK; r++) {
      sum += shares[0][token][ROWS + r] * static_cast<float>(reinterpret_cast<const T*>(factors)[r]);
    }
  }
#endif
  if (output < valid) { out[(int64_t)token * outputs + block * ROWS + output] = static_cast<T>(sum); }
}
