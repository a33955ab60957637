// Merges what the blocks of row_attention.cu made of their shares of the keys: one block a query, one thread a dimension.
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
