#include "moe-cold.h"

#include <algorithm>
#include <cmath>
#include <cstring>

//
// activation
//

static float gelu(float x) {
    constexpr float GELU_COEF_A    = 0.044715f;
    constexpr float SQRT_2_OVER_PI = 0.79788456080286535587989211986876f;
    return 0.5f*x*(1.0f + tanhf(SQRT_2_OVER_PI*x*(1.0f + GELU_COEF_A*x*x)));
}

// ggml-cpu looks GELU up in a table over all F16 values: the same rounding here, or F32 experts would differ by 1e-3
static const float * gelu_f16_table() {
    static const std::vector<float> table = [] {
        std::vector<float> t(1 << 16);
        for (int i = 0; i < 1 << 16; i++) {
            const ggml_fp16_t h = (ggml_fp16_t) i;
            t[i] = ggml_fp16_to_fp32(ggml_fp32_to_fp16(gelu(ggml_fp16_to_fp32(h))));
        }
        return t;
    }();
    return table.data();
}

float moe_activate(moe_activation act, float gate, float up) {
    switch (act) {
        case MOE_ACT_SWIGLU:
            return gate/(1.0f + expf(-gate))*up;
        case MOE_ACT_GEGLU:
            if (gate <= -10.0f) {
                return 0.0f;
            }
            if (gate >= 10.0f) {
                return gate*up;
            }
            return gelu_f16_table()[ggml_fp32_to_fp16(gate)]*up;
        case MOE_ACT_REGLU:
            return gate > 0.0f ? gate*up : 0.0f;
        case MOE_ACT_SWIGLU_OAI: {
            const float x = std::min(gate, MOE_OAI_LIMIT);
            const float y = std::min(std::max(up, -MOE_OAI_LIMIT), MOE_OAI_LIMIT);
            return x/(1.0f + expf(-MOE_OAI_ALPHA*x))*(y + 1.0f);
        }
    }
    return 0.0f;
}

//
// rows of weights
//

// gate (0) and up (1): the same tensor if merged
static int matrix_part(const moe_block & block, int matrix) {
    return matrix == 1 && !block.merged ? MOE_UP : MOE_GATE;
}

static size_t matrix_offset(const moe_block & block, int matrix) {
    return matrix == 1 && block.merged ? (size_t) block.n_ff*block.host[MOE_GATE]->nb[1] : 0;
}

static const float * matrix_bias(const moe_block & block, int matrix, int expert) {
    const int part = matrix == 1 && !block.merged ? MOE_UP_B : MOE_GATE_B;
    if (!block.host[part]) {
        return nullptr;
    }
    return (const float *) block.expert_data(part, expert) + (matrix == 1 && block.merged ? block.n_ff : 0);
}

static void prefetch_row(const char * p, size_t n) {
#if defined(__GNUC__)
    for (size_t i = 0; i < n; i += 64) {
        __builtin_prefetch(p + i);
    }
#else
    (void) p; (void) n;
#endif
}

//
// lane
//

void moe_cold_lane::choose_kernels(moe_block & block) const {
    block.gate_kernel = moe_kernel_for(block.host[MOE_GATE]->type, own_kernels);
    block.up_kernel   = moe_kernel_for(block.host[matrix_part(block, 1)]->type, own_kernels);
    block.down_kernel = moe_kernel_for(block.host[MOE_DOWN]->type, own_kernels);
}

void moe_cold_lane::reserve(const moe_block & block, int max_tokens) {
    const int max_pairs = max_tokens*block.n_used;
    for (int m = 0; m < 2; m++) {
        const ggml_type type = traits(block.host[matrix_part(block, m)]->type)->vec_dot_type;
        const size_t n = ggml_row_size(type, block.n_embd)*(block.weight_before ? max_pairs : max_tokens);
        x_quant[m].resize(std::max(x_quant[m].size(), n));
    }
    hidden.resize(std::max(hidden.size(), (size_t) max_pairs*block.n_ff));
    const ggml_type type = traits(block.host[MOE_DOWN]->type)->vec_dot_type;
    h_quant.resize(std::max(h_quant.size(), ggml_row_size(type, block.n_ff)*max_pairs));
    pairs.reserve(max_pairs);
    experts.reserve(max_pairs);
}

// the up matrix needs inputs of its own only if its vec_dot_type is another one than gate's
static bool up_input_differs(const moe_block & block, moe_type_traits_t traits) {
    return !block.merged && traits(block.host[MOE_UP]->type)->vec_dot_type != traits(block.host[MOE_GATE]->type)->vec_dot_type;
}

void moe_cold_lane::begin(const moe_block & block, const char * x_given) {
    pairs.clear();
    experts.clear();
    next_gate_up.store(0, std::memory_order_relaxed);
    next_down.store(0, std::memory_order_relaxed);
    for (int m = 0; m < 2; m++) {
        const int from = m == 1 && up_input_differs(block, traits) ? 1 : 0; // whose rows it reads
        x_row [m] = ggml_row_size(traits(block.host[matrix_part(block, from)]->type)->vec_dot_type, block.n_embd);
        x_rows[m] = x_given ? x_given : x_quant[from].data();
    }
    h_row = ggml_row_size(traits(block.host[MOE_DOWN]->type)->vec_dot_type, block.n_ff);
}

void moe_cold_lane::quantize(ggml_type type, const float * src, char * dst, int n) const {
    if (type == GGML_TYPE_F32) {
        memcpy(dst, src, n*sizeof(float));
    } else {
        traits(type)->from_float(src, dst, n);
    }
}

bool moe_cold_lane::one_input(const moe_block & block) const {
    return !block.weight_before && !up_input_differs(block, traits);
}

void moe_cold_lane::quantize_tokens(const moe_block & block, const char * x, size_t x_stride, int n_tokens, int ith, int n_threads) {
    const ggml_type type_gate = traits(block.host[MOE_GATE]->type)->vec_dot_type;
    const size_t row_gate = ggml_row_size(type_gate, block.n_embd);
    const bool two = up_input_differs(block, traits);
    // from the last thread on: thread 0 is busy splitting the pairs
    for (int t = n_threads - 1 - ith; t < n_tokens; t += n_threads) {
        const float * src = (const float *) (x + t*x_stride);
        quantize(type_gate, src, x_quant[0].data() + t*row_gate, block.n_embd);
        if (two) {
            const ggml_type type_up = traits(block.host[MOE_UP]->type)->vec_dot_type;
            quantize(type_up, src, x_quant[1].data() + t*ggml_row_size(type_up, block.n_embd), block.n_embd);
        }
    }
}

void moe_cold_lane::quantize_pairs(const moe_block & block, const char * x, size_t x_stride, int ith, int n_threads) {
    const ggml_type type_gate = traits(block.host[MOE_GATE]->type)->vec_dot_type;
    const bool two = up_input_differs(block, traits);
    static thread_local std::vector<float> scaled;
    scaled.resize(block.n_embd);
    for (size_t q = ith; q < pairs.size(); q += n_threads) {
        const float * src = (const float *) (x + pairs[q].token*x_stride);
        for (int i = 0; i < block.n_embd; i++) {
            scaled[i] = src[i]*pairs[q].weight;
        }
        quantize(type_gate, scaled.data(), x_quant[0].data() + q*x_row[0], block.n_embd);
        if (two) {
            quantize(traits(block.host[MOE_UP]->type)->vec_dot_type, scaled.data(), x_quant[1].data() + q*x_row[1], block.n_embd);
        }
    }
}

// Work units are R rows of one expert. The next unit is taken before the current one is computed, so that its first rows can
// be prefetched: an expert's rows are contiguous, but the step to the next expert would otherwise stall on DRAM.
void moe_cold_lane::gate_up(const moe_block & block, int n_threads, const std::atomic<bool> & given_up) {
    const int n_experts   = (int) experts.size();
    const int R           = n_experts*block.n_ff/16 < 8*n_threads ? 8 : 16;
    const int n_per_exp   = (block.n_ff + R - 1)/R;
    const int n_units     = n_per_exp*n_experts;
    constexpr int N_AHEAD = 2; // rows

    const ggml_type_traits_cpu * tr[2];
    const moe_kernel kernel[2] = { block.gate_kernel, block.up_kernel };
    size_t row[2];
    size_t offset[2];
    for (int m = 0; m < 2; m++) {
        const ggml_tensor * w = block.host[matrix_part(block, m)];
        tr[m]     = traits(w->type);
        row[m]    = w->nb[1];
        offset[m] = matrix_offset(block, m);
    }
    auto weights = [&](int m, int expert) { return block.expert_data(matrix_part(block, m), expert) + offset[m]; };

    int u = next_gate_up.fetch_add(1, std::memory_order_relaxed);
    while (u < n_units && !given_up.load(std::memory_order_relaxed)) {
        const int u_next = next_gate_up.fetch_add(1, std::memory_order_relaxed);
        const moe_cold_expert & ce = experts[u/n_per_exp];
        const int r0 = (u % n_per_exp)*R;
        const int r1 = std::min(r0 + R, block.n_ff);
        const char  * base[2] = { weights(0, ce.expert), weights(1, ce.expert) };
        const float * bias[2] = { matrix_bias(block, 0, ce.expert), matrix_bias(block, 1, ce.expert) };
        const char  * ahead[2] = { nullptr, nullptr };
        if (u_next < n_units) {
            for (int m = 0; m < 2; m++) {
                ahead[m] = weights(m, experts[u_next/n_per_exp].expert) + (size_t) (u_next % n_per_exp)*R*row[m];
            }
        }
        for (int r = r0; r < r1; r++) {
            if (ahead[0] && r + N_AHEAD >= r1) {
                for (int m = 0; m < 2; m++) {
                    prefetch_row(ahead[m] + (r + N_AHEAD - r1)*row[m], row[m]);
                }
            }
            for (int c = 0; c < ce.n; c += MOE_MAX_COLS) {
                const int nc = std::min(MOE_MAX_COLS, ce.n - c);
                float out[2][MOE_MAX_COLS];
                for (int m = 0; m < 2; m++) {
                    const void * y[MOE_MAX_COLS];
                    for (int j = 0; j < nc; j++) {
                        const int q = ce.first + c + j;
                        y[j] = input_row(m, block.weight_before ? q : pairs[q].token);
                    }
                    kernel[m].fn(block.n_embd, base[m] + r*row[m], y, nc, out[m], tr[m]->vec_dot);
                }
                for (int j = 0; j < nc; j++) {
                    const float g = out[0][j] + (bias[0] ? bias[0][r] : 0.0f);
                    const float v = out[1][j] + (bias[1] ? bias[1][r] : 0.0f);
                    hidden[(size_t) (ce.first + c + j)*block.n_ff + r] = moe_activate(block.act, g, v);
                }
            }
        }
        u = u_next;
    }
}

// Blocks of a row are quantised independently of each other: with few pairs there is work for more threads than pairs.
void moe_cold_lane::quantize_hidden(const moe_block & block, int ith, int n_threads) {
    const ggml_type type = traits(block.host[MOE_DOWN]->type)->vec_dot_type;
    const int    part    = block.n_ff % 256 == 0 ? 256 : block.n_ff; // a multiple of every type's block
    const int    n_parts = block.n_ff/part;
    const size_t size    = ggml_row_size(type, part);
    for (size_t u = ith; u < pairs.size()*n_parts; u += n_threads) {
        const size_t q = u/n_parts;
        const size_t i = u % n_parts;
        quantize(type, hidden.data() + q*block.n_ff + i*part, h_quant.data() + q*h_row + i*size, part);
    }
}

// Work units are R output rows over all experts: the accumulation of a row stays with one thread, experts in ascending order.
void moe_cold_lane::down(const moe_block & block, int n_tokens, char * dst, size_t dst_stride, int n_threads, const std::atomic<bool> & given_up) {
    const ggml_tensor * w = block.host[MOE_DOWN];
    const ggml_type_traits_cpu * tr = traits(w->type);
    const moe_kernel kernel = block.down_kernel;
    const size_t row = w->nb[1];

    constexpr size_t GOAL = 48 << 10; // bytes of an expert at a time: far fewer halve the speed, they break up the streams from DRAM
    constexpr int R_FEW   = 32;
    constexpr int R_MANY  = 64;
    constexpr int N_AHEAD = 5;
    // the same number of units for every thread
    const int r_goal   = std::min(R_MANY, std::max(R_FEW, (int) (GOAL/row)));
    const int n_rounds = std::max(1, block.n_embd/(r_goal*n_threads));
    const int R        = std::max(N_AHEAD, (block.n_embd + n_rounds*n_threads - 1)/(n_rounds*n_threads));
    const int n_units  = (block.n_embd + R - 1)/R;

    static thread_local std::vector<float> acc; // [n_tokens][R]
    acc.resize((size_t) n_tokens*R);
    for (int u; (u = next_down.fetch_add(1, std::memory_order_relaxed)) < n_units && !given_up.load(std::memory_order_relaxed); ) {
        const int r0 = u*R;
        const int r1 = std::min(r0 + R, block.n_embd);
        std::fill(acc.begin(), acc.end(), 0.0f);
        for (size_t ie = 0; ie < experts.size(); ie++) {
            const moe_cold_expert & ce = experts[ie];
            const char  * base = block.expert_data(MOE_DOWN, ce.expert);
            const char  * next = ie + 1 < experts.size() ? block.expert_data(MOE_DOWN, experts[ie + 1].expert) : nullptr;
            const float * bias = block.host[MOE_DOWN_B] ? (const float *) block.expert_data(MOE_DOWN_B, ce.expert) : nullptr;
            for (int r = r0; r < r1; r++) {
                if (r + N_AHEAD < r1) {
                    if (!kernel.prefetches) {
                        prefetch_row(base + (r + N_AHEAD)*row, row);
                    }
                } else if (next) {
                    prefetch_row(next + (r0 + r + N_AHEAD - r1)*row, row);
                }
                for (int c = 0; c < ce.n; c += MOE_MAX_COLS) {
                    const int nc = std::min(MOE_MAX_COLS, ce.n - c);
                    const void * y[MOE_MAX_COLS];
                    float out[MOE_MAX_COLS];
                    for (int j = 0; j < nc; j++) {
                        y[j] = h_quant.data() + (size_t) (ce.first + c + j)*h_row;
                    }
                    kernel.fn(block.n_ff, base + r*row, y, nc, out, tr->vec_dot);
                    for (int j = 0; j < nc; j++) {
                        const moe_cold_pair & p = pairs[ce.first + c + j];
                        const float v = out[j] + (bias ? bias[r] : 0.0f);
                        acc[(size_t) p.token*R + r - r0] += block.weight_before ? v : p.weight*v;
                    }
                }
            }
        }
        for (int t = 0; t < n_tokens; t++) {
            memcpy(dst + t*dst_stride + r0*sizeof(float), acc.data() + (size_t) t*R, sizeof(float)*(r1 - r0));
        }
    }
}

bool moe_cold_lane::run(const moe_block & block, const char * x, size_t x_stride, int n_tokens,
        char * dst, size_t dst_stride, int ith, int n_threads, moe_barrier & barrier) {
    if (block.weight_before) {
        quantize_pairs(block, x, x_stride, ith, n_threads);
        if (!barrier.wait(n_threads)) {
            return false;
        }
    }
    gate_up(block, n_threads, barrier.given_up);
    if (!barrier.wait(n_threads)) {
        return false;
    }
    quantize_hidden(block, ith, n_threads);
    if (!barrier.wait(n_threads)) {
        return false;
    }
    down(block, n_tokens, dst, dst_stride, n_threads, barrier.given_up);
    return !barrier.given_up.load(std::memory_order_relaxed);
}
