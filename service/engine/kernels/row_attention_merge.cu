// Merges what the blocks of row_attention.cu made of their shares of a row's keys: one block a query, one thread a dimension.
// Queries of rows whose keys were one block's are in `whole`.
const int N = whole_shape[1], heads = whole_shape[2], most = sums_shape[3];
const int64_t query = blockIdx.x, at = query * V + threadIdx.x;
const int start = starts[blockIdx.x / (N * heads)];
const int keys = start + N - first_tile<WINDOW>(start) * 16;
const int shares = shares_of<SPLIT_KEYS, SPLIT_LONG>(keys, usual[0], most);
if (shares == 1) {
  out[at] = whole[at];
  return;
}
float top = -INFINITY, total = 0.0f, value = 0.0f;
for (int s = 0; s < shares; s++) { top = fmaxf(top, tops[query * most + s]); }
#pragma unroll 4
for (int s = 0; s < shares; s++) {
  // A query may see none of a share's keys.
  const float share = tops[query * most + s] == -INFINITY ? 0.0f : exp2f(tops[query * most + s] - top);
  total += share * sums[query * most + s];
  value += share * parts[(query * most + s) * V + threadIdx.x];
}
out[at] = static_cast<T>(total > 0.0f ? value / total : 0.0f);
