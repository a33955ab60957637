// Merges the results of row_attention.cu's blocks for their shares of the keys. One block per query, one thread per dimension.
const int64_t row = blockIdx.x;
const int S = sums_shape[3];
float most = -INFINITY, total = 0.0f, value = 0.0f;
for (int s = 0; s < S; s++) { most = fmaxf(most, tops[row * S + s]); }
for (int s = 0; s < S; s++) {
  if (tops[row * S + s] == -INFINITY) { continue; }
  const float share = exp2f(tops[row * S + s] - most);
  total += share * sums[row * S + s];
  value += share * parts[(row * S + s) * V + threadIdx.x];
}
out[row * V + threadIdx.x] = static_cast<T>(total > 0.0f ? value / total : 0.0f);
