// The body of a kernel that `mx.fast.cuda_kernel` makes (service/engine/products.py), for tensor cores of compute capability
// 8.0 and later: a block multiplies DEEP times 16 rows of one of COUNT weight matrices with up to 8 TILES tokens. 8 warps share
// the inner dimension, 64 elements of it at a time, and read each weight once, straight into registers. How terms are added
// depends on the inner dimension alone: a token's product has the same bits whatever it is computed with.
// Constants: T (bfloat16 or float16), HALF (it is float16), TILES, DEEP.
constexpr int WARPS = 8, ROWS = 16 * DEEP;
const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q = lane & 3;
const int tokens = x_shape[0], inner = x_shape[1], chunks = inner / 64;

const T* weight = weight0;
T* out = out0;
int outputs = weight0_shape[0], block = blockIdx.x;
#if COUNT > 1
if (block >= outputs / ROWS) {
  block -= outputs / ROWS;
  weight = weight1;
  out = out1;
  outputs = weight1_shape[0];
#if COUNT > 2
  if (block >= outputs / ROWS) {
    block -= outputs / ROWS;
    weight = weight2;
    out = out2;
    outputs = weight2_shape[0];
  }
#endif
}
#endif

// Which element stands where in a fragment is free as long as weights and tokens agree: a thread takes two times 8 neighbouring
// elements of 64, so that four threads read 64 bytes in a row.
const uint4* rows[DEEP][2];
#pragma unroll
for (int d = 0; d < DEEP; d++) {
  #pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = block * ROWS + d * 16 + g + 8 * h;
    rows[d][h] = reinterpret_cast<const uint4*>(weight + (int64_t)row * inner) + q;
  }
}
const uint4* of[TILES];
float acc[DEEP][TILES][4];
#pragma unroll
for (int j = 0; j < TILES; j++) {
  of[j] = reinterpret_cast<const uint4*>(x + (int64_t)min(8 * j + g, tokens - 1) * inner) + q;
  #pragma unroll
  for (int d = 0; d < DEEP; d++) { acc[d][j][0] = acc[d][j][1] = acc[d][j][2] = acc[d][j][3] = 0.0f; }
}

uint4 a[DEEP][2][2], next[DEEP][2][2];
if (warp < chunks) {
  #pragma unroll
  for (int i = 0; i < 4 * DEEP; i++) { a[i / 4][i / 2 % 2][i % 2] = __ldg(rows[i / 4][i / 2 % 2] + 8 * warp + 4 * (i % 2)); }
}
#pragma unroll 2
for (int c = warp; c < chunks; c += WARPS) {
  const int after = min(c + WARPS, chunks - 1);
  #pragma unroll
  for (int i = 0; i < 4 * DEEP; i++) {
    next[i / 4][i / 2 % 2][i % 2] = __ldg(rows[i / 4][i / 2 % 2] + 8 * after + 4 * (i % 2));
  }
  #pragma unroll
  for (int j = 0; j < TILES; j++) {
    #pragma unroll
    for (int p = 0; p < 2; p++) {
      const uint4 b = __ldg(of[j] + 8 * c + 4 * p);
      #pragma unroll
      for (int d = 0; d < DEEP; d++) {
        multiply<HALF>(acc[d][j], a[d][0][p].x, a[d][1][p].x, a[d][0][p].y, a[d][1][p].y, b.x, b.y);
        multiply<HALF>(acc[d][j], a[d][0][p].z, a[d][1][p].z, a[d][0][p].w, a[d][1][p].w, b.z, b.w);
      }
    }
  }
  #pragma unroll
  for (int i = 0; i < 4 * DEEP; i++) { a[i / 4][i / 2 % 2][i % 2] = next[i / 4][i / 2 % 2][i % 2]; }
}

__shared__ float shares[WARPS][TILES * 8][17];
#pragma unroll
for (int d = 0; d < DEEP; d++) {
  #pragma unroll
  for (int i = 0; i < 4 * TILES; i++) {
    shares[warp][8 * (i / 4) + 2 * q + i % 2][g + 8 * (i / 2 % 2)] = acc[d][i / 4][i % 4];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < TILES * 8 * 16; i += WARPS * 32) {
    const int token = i / 16, output = i % 16;
    float sum = 0.0f;
    #pragma unroll
    for (int w = 0; w < WARPS; w++) { sum += shares[w][token][output]; }
    if (token < tokens) { out[(int64_t)token * outputs + block * ROWS + d * 16 + output] = static_cast<T>(sum); }
  }
  if (d + 1 < DEEP) { __syncthreads(); }
}
