#pragma once

// The cold lane: experts that no slot holds, computed by CPU threads from host memory. Both executions of a hybrid layer
// share it. Gate and up in one pass, activation, down, weighting and accumulation; threads own output rows, so there are no
// atomics on data and the result does not depend on which thread computed what.

#include "moe-barrier.h"
#include "moe-block.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

struct moe_cold_pair {
    int32_t token;
    float   weight;
};

// consecutive pairs of one expert
struct moe_cold_expert {
    int32_t expert;
    int32_t first;
    int32_t n;
};

class moe_cold_lane {
public:
    moe_cold_lane(moe_type_traits_t traits, bool own_kernels) : traits(traits), own_kernels(own_kernels) {}

    void choose_kernels(moe_block & block) const;

    // buffers for blocks of this shape
    void reserve(const moe_block & block, int max_tokens);

    // By thread 0, before a barrier: the work of one call; the caller fills pairs and experts. x_quant: the tokens' rows in gate's
    // vec_dot_type if the caller has them (not if up takes another type, or weight_before), else quantize_tokens makes them.
    void begin(const moe_block & block, const char * x_quant = nullptr);
    bool one_input(const moe_block & block) const; // may x_quant be given?
    std::vector<moe_cold_pair>   pairs;
    std::vector<moe_cold_expert> experts; // in ascending order of expert

    // by all threads; needs only block and n_tokens, so it can run while thread 0 splits the pairs (not if weight_before)
    void quantize_tokens(const moe_block & block, const char * x, size_t x_stride, int n_tokens, int ith, int n_threads);

    // by all threads, after a barrier; x: F32 rows of n_embd. Writes all of dst[n_tokens][n_embd].
    // The caller sees the result after its next barrier. false: a barrier was given up, dst is not complete.
    bool run(const moe_block & block, const char * x, size_t x_stride, int n_tokens,
             char * dst, size_t dst_stride, int ith, int n_threads, moe_barrier & barrier);

private:
    void quantize(ggml_type type, const float * src, char * dst, int n) const;
    void quantize_pairs(const moe_block & block, const char * x, size_t x_stride, int ith, int n_threads);
    void gate_up       (const moe_block & block, int n_threads, const std::atomic<bool> & given_up);
    void quantize_hidden(const moe_block & block, int ith, int n_threads);
    void down          (const moe_block & block, int n_tokens, char * dst, size_t dst_stride, int n_threads, const std::atomic<bool> & given_up);

    const char * input_row(int matrix, int row) const { return x_rows[matrix] + row*x_row[matrix]; }

    moe_type_traits_t traits;
    bool own_kernels;

    // inputs in the vec_dot_type of gate and of up (the second only if it differs), a row per token, or per pair if weight_before
    std::vector<char>  x_quant[2];
    const char *       x_rows[2] = {nullptr, nullptr}; // where they are: in x_quant, or what begin was given
    std::vector<float> hidden;   // [n_pairs][n_ff], after the activation
    std::vector<char>  h_quant;  // the same in the vec_dot_type of down
    size_t x_row[2] = {0, 0};
    size_t h_row    = 0;

    alignas(64) std::atomic<int> next_gate_up{0};
    alignas(64) std::atomic<int> next_down{0};
};

// act(gate)*up, as ggml-cpu computes it
float moe_activate(moe_activation act, float gate, float up);
