#pragma once

// The device lane: resident experts, computed on a backend instance of its own by a small graph that was built before.
// Only the public ggml-backend API, so that any device can be the lane: CUDA, Vulkan, Metal, RPC, a second CPU backend.

#include "moe-block.h"

#include "ggml-alloc.h"

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

struct moe_hot_pair {
    int32_t token;
    int32_t k;     // rank of the expert in the token's choice
    int32_t slot;
    float   weight;
};

// The lane's graph of one block for n_rows pairs of n_tokens tokens, both rounded up: few graphs serve all batches. All that
// changes from call to call lies in one region of device memory that one copy fills.
struct moe_device_graph {
    ggml_context_ptr ctx;
    ggml_cgraph * gf     = nullptr;
    ggml_tensor * region = nullptr; // I8, the whole input region
    ggml_tensor * out    = nullptr; // F32 [n_embd, n_tokens]
    int n_rows      = 0;
    int n_tokens    = 0;
    size_t off_rows = 0; // I32 [n_rows]: the pair's token
    size_t off_ids  = 0; // I32 [n_rows]: the pair's slot
    size_t off_pick = 0; // I32 [n_used*n_tokens]: the row of (token, k)
    size_t off_w    = 0; // F32 [n_used*n_tokens]: its weight, 0 if it is cold
    size_t off_wrow = 0; // F32 [n_rows]: weight of the pair's input (weight_before)
    size_t off_x    = 0; // the activations, last: those of padding tokens need not be filled
    uint64_t generation = 0;
};

using moe_device_graphs = std::map<uint32_t, std::unique_ptr<moe_device_graph>>; // by n_rows << 16 | n_tokens

class moe_device_lane {
public:
    moe_device_lane(ggml_backend_dev_t dev, int max_tokens);

    bool init(std::string & error);

    // x_cols, here and below: floats from one token's activations to the next in the caller's memory
    // does the device support the block's graph? `error` names the first operation that it does not
    bool supports(const moe_block & block, int x_cols, std::string & error) const;

    // buffers for a block of this shape; to be called for all blocks before the first launch
    bool reserve(const moe_block & block, int x_cols, std::string & error);

    // starts the computation of the pairs (at least one); x may be read until wait() if it is page-locked
    bool launch(const moe_block & block, const moe_tensors & slots, moe_device_graphs & graphs, const std::vector<moe_hot_pair> & pairs,
                const char * x, size_t x_stride, int n_tokens, bool x_pinned);

    // waits; the result, F32 [n_tokens][n_embd], is valid until the next launch
    const float * wait();

    size_t device_bytes() const;

    ggml_backend_dev_t         dev;
    ggml_backend_buffer_type_t buft      = nullptr;
    ggml_backend_buffer_type_t host_buft = nullptr; // page-locked if the device has such memory

private:
    int  round_rows(const moe_block & block, int n_pairs) const;
    int  round_tokens(int n_tokens) const;
    bool per_row_ids(const moe_block & block) const;
    moe_device_graph * graph(const moe_block & block, const moe_tensors & slots, moe_device_graphs & graphs, int n_rows, int n_tokens, int x_cols);
    std::unique_ptr<moe_device_graph> build(const moe_block & block, const moe_tensors & slots, int n_rows, int n_tokens, int x_cols) const;
    size_t place_inputs(moe_device_graph & g, ggml_backend_buffer_t buf) const;

    int  max_tokens;
    bool is_cuda = false;
    uint64_t generation = 1; // of the compute buffer: graphs of an older one are rebuilt

    ggml_backend_ptr        backend;
    ggml_gallocr_ptr        galloc;
    ggml_backend_buffer_ptr buf_in;
    ggml_backend_buffer_ptr buf_stage_in;
    ggml_backend_buffer_ptr buf_stage_out;
    size_t in_size  = 0;
    size_t out_size = 0;
    char * stage_in  = nullptr;
    char * stage_out = nullptr;
};

// act(gate)*up as ggml's operation
ggml_tensor * moe_activation_op(ggml_context * ctx, moe_activation act, ggml_tensor * gate, ggml_tensor * up);

// a second CPU backend instance computes with one thread: it runs inside one of the graph's own threads
void moe_set_one_thread(ggml_backend_t backend);
