// Attention as the formulas say it, one thread to a row: the kernels to read first, and what the others are faster than.

#pragma once

__device__ float number(const Head& head, int row, int column) {
    return unpack(head.data[row * head.row + column]).x;
}

__device__ void set(const Head& head, int row, int column, float x) {
    head.data[row * head.row + column] = uint16_t(pack(x, 0.0f));
}

__device__ float dot(const Head& x, int i, const Head& y, int j, int head_dim) {
    float sum = 0.0f;
    for (int d = 0; d < head_dim; d++) sum += number(x, i, d) * number(y, j, d);
    return sum;
}

// One query: the softmax of its scores, one key after the other, with the largest score so far as the reference.
__global__ void naive_forward_kernel(const __grid_constant__ Arguments a) {
    int64_t place = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (place >= int64_t(a.batch) * a.heads * a.num_queries) return;
    int i = place % a.num_queries, head = place / a.num_queries % a.heads, batch = place / a.num_queries / a.heads;
    int kv_head = head / (a.heads / a.kv_heads);
    Head q(a.q, batch, head), k(a.k, batch, kv_head), v(a.v, batch, kv_head), out(a.out, batch, head);
    float sum[HEAD_DIM] = {}, total = 0.0f, largest = -infinity();
    for (int j = 0; j < (a.causal ? min(i + 1, a.num_keys) : a.num_keys); j++) {
        float score = dot(q, i, k, j, a.head_dim) * a.scale_log2, before = largest;
        largest = fmaxf(largest, score);
        float shrink = power_of_2(before - largest), p = power_of_2(score - largest);
        total = total * shrink + p;
        for (int d = 0; d < a.head_dim; d++) sum[d] = sum[d] * shrink + p * number(v, j, d);
    }
    for (int d = 0; d < a.head_dim; d++) set(out, i, d, sum[d] / total);
    a.lse[place] = (largest + log2f(total)) * 0.69314718056f;
}

// dS of query i of query head `head` and key j, and P.
__device__ float2 naive_ds(const Arguments& a, int batch, int head, int i, int j) {
    int kv_head = head / (a.heads / a.kv_heads);
    Head q(a.q, batch, head), k(a.k, batch, kv_head), v(a.v, batch, kv_head), dout(a.dout, batch, head);
    int64_t place = (int64_t(batch) * a.heads + head) * a.num_queries + i;
    float p = power_of_2(dot(q, i, k, j, a.head_dim) * a.scale_log2 - a.lse[place] * 1.44269504089f);
    return make_float2(p * (dot(dout, i, v, j, a.head_dim) - a.statistics[place]), p);
}

// One query: delta, then dQ.
__global__ void naive_dq_kernel(const __grid_constant__ Arguments a) {
    int64_t place = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (place >= int64_t(a.batch) * a.heads * a.num_queries) return;
    int i = place % a.num_queries, head = place / a.num_queries % a.heads, batch = place / a.num_queries / a.heads;
    Head k(a.k, batch, head / (a.heads / a.kv_heads)), dq(a.dq, batch, head);
    a.statistics[place] = dot(Head(a.out, batch, head), i, Head(a.dout, batch, head), i, a.head_dim);
    float sum[HEAD_DIM] = {};
    for (int j = 0; j < (a.causal ? min(i + 1, a.num_keys) : a.num_keys); j++) {
        float ds = naive_ds(a, batch, head, i, j).x;
        for (int d = 0; d < a.head_dim; d++) sum[d] += ds * number(k, j, d);
    }
    for (int d = 0; d < a.head_dim; d++) set(dq, i, d, sum[d] * a.scale);
}

// One key: dK and dV, over the queries of all heads that read it. Runs after naive_dq_kernel, which writes delta.
__global__ void naive_dkdv_kernel(const __grid_constant__ Arguments a) {
    int64_t place = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (place >= int64_t(a.batch) * a.kv_heads * a.num_keys) return;
    int j = place % a.num_keys, kv_head = place / a.num_keys % a.kv_heads, batch = place / a.num_keys / a.kv_heads;
    float dk_sum[HEAD_DIM] = {}, dv_sum[HEAD_DIM] = {};
    for (int head = kv_head * (a.heads / a.kv_heads); head < (kv_head + 1) * (a.heads / a.kv_heads); head++)
        for (int i = a.causal ? j : 0; i < a.num_queries; i++) {
            float2 ds = naive_ds(a, batch, head, i, j);
            Head q(a.q, batch, head), dout(a.dout, batch, head);
            for (int d = 0; d < a.head_dim; d++) dk_sum[d] += ds.x * number(q, i, d), dv_sum[d] += ds.y * number(dout, i, d);
        }
    Head dk(a.dk, batch, kv_head), dv(a.dv, batch, kv_head);
    for (int d = 0; d < a.head_dim; d++) set(dk, j, d, dk_sum[d] * a.scale), set(dv, j, d, dv_sum[d]);
}
