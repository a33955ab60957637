// The body of a kernel that `mx.fast.cuda_kernel` makes (service/engine/products.py), for tensor cores of compute capability
// 8.0 and later: a block of 8 warps multiplies 16 rows of a weight matrix with up to 8 TILES tokens. The warps share the inner
// dimension, 64 elements of it at a time, and read each weight once, straight into registers.
// Constants: T (bfloat16 or float16), HALF (it is float16), TILES.
constexpr int WARPS = 8;
const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q = lane & 3;
const int tokens = x_shape[0], inner = weight_shape[1], outputs = weight_shape[0], chunks = inner / 64;
const int row = blockIdx.x * 16 + g;

// Which element stands where in a fragment is free as long as weights and tokens agree: a thread takes two times 8 neighbouring
// elements of 64, so that four threads read 64 bytes in a row.
const uint4* w0 = reinterpret_cast<const uint4*>(weight + (int64_t)row * inner) + q;
const uint4* w1 = reinterpret_cast<const uint4*>(weight + (int64_t)(row + 8) * inner) + q;
const uint4* of[TILES];
float acc[TILES][4];
#pragma unroll
for (int j = 0; j < TILES; j++) {
  of[j] = reinterpret_cast<const uint4*>(x + (int64_t)min(8 * j + g, tokens - 1) * inner) + q;
  acc[j][0] = acc[j][1] = acc[j][2] = acc[j][3] = 0.0f;
}

uint4 a[2][2], next[2][2];
if (warp < chunks) {
  a[0][0] = __ldg(w0 + 8 * warp);
  a[0][1] = __ldg(w0 + 8 * warp + 4);
  a[1][0] = __ldg(w1 + 8 * warp);
  a[1][1] = __ldg(w1 + 8 * warp + 4);
}
#pragma unroll 2
for (int c = warp; c < chunks; c += WARPS) {
  const int after = min(c + WARPS, chunks - 1);
  next[0][0] = __ldg(w0 + 8 * after);
  next[0][1] = __ldg(w0 + 8 * after + 4);
  next[1][0] = __ldg(w1 + 8 * after);
  next[1][1] = __ldg(w1 + 8 * after + 4);
  #pragma unroll
  for (int j = 0; j < TILES; j++) {
    #pragma unroll
    for (int p = 0; p < 2; p++) {
      const uint4 b = __ldg(of[j] + 8 * c + 4 * p);
      multiply<HALF>(acc[j], a[0][p].x, a[1][p].x, a[0][p].y, a[1][p].y, b.x, b.y);
      multiply<HALF>(acc[j], a[0][p].z, a[1][p].z, a[0][p].w, a[1][p].w, b.z, b.w);
    }
  }
  #pragma unroll
  for (int p = 0; p < 2; p++) {
    a[0][p] = next[0][p];
    a[1][p] = next[1][p];
  }
}

// The warps' shares, added in a fixed order, so that the same call always gives the same bits.
__shared__ float shares[WARPS][TILES * 8][17];
#pragma unroll
for (int j = 0; j < TILES; j++) {
  #pragma unroll
  for (int i = 0; i < 4; i++) { shares[warp][8 * j + 2 * q + i % 2][g + 8 * (i / 2)] = acc[j][i]; }
}
__syncthreads();
for (int i = threadIdx.x; i < TILES * 8 * 16; i += WARPS * 32) {
  const int token = i / 16, output = i % 16;
  float sum = 0.0f;
  #pragma unroll
  for (int w = 0; w < WARPS; w++) { sum += shares[w][token][output]; }
  if (token < tokens) { out[(int64_t)token * outputs + blockIdx.x * 16 + output] = static_cast<T>(sum); }
}
