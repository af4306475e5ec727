#pragma once

// What the routers chose in the last decode: a log of ids (and weights, if somebody listens), and the counts that follow from it.
//
// A layer in the portable execution writes its part of the log itself, one in the in-stream execution writes into the log of its
// device. A layer on upstream's path copies its ids inside the graph into a buffer
// of its device, and one asynchronous copy per device and ubatch brings them to the host: no split, no wait, and the copy is one
// more reader of the ids after the weights, so that upstream's fused top-k stays fused.

#include "moe-block.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

struct moe_router_log {
    // rows in ascending order; devices[i]: where row i's router is computed
    bool init(int n_rows, int n_used, int n_expert, int n_batch, int n_ubatch, ggml_backend_buffer_type_t host_buft,
              const std::vector<ggml_backend_dev_t> & devices, std::string & error);

    // per decode, per ubatch
    void begin_decode();
    void begin_ubatch(int n_tokens, const int8_t * has_output); // has_output[n_tokens]: the token's logits are wanted; may be null
    // fetches what the rows in `on_device` have written on their devices; `cropped` rows have n_outputs entries, not n_tokens
    void end_ubatch(const std::vector<bool> & on_device, const std::vector<bool> & cropped, int n_outputs,
                    const std::vector<ggml_backend_t> & backends, bool weights);

    // the current ubatch's entries of a row, [n_tokens][n_used] with stride n_used; null if the log is full
    int       n_tokens() const { return segments.empty() ? 0 : segments.back().n_tokens; } // of the current ubatch
    int32_t * ids    (int row);
    float   * weights(int row);

    // the graph node that copies a row's ids (or weights) into the device's log; n_tokens: of the ubatch
    ggml_tensor * copy_ids    (ggml_context * ctx, int row, ggml_tensor * ids, int n_tokens);
    ggml_tensor * copy_weights(ggml_context * ctx, int row, ggml_tensor * weights, int n_tokens);
    // the same place in the device's log, [k, n], for an operation that writes there itself
    ggml_tensor * view_ids    (ggml_context * ctx, int row, int k, int n, int n_tokens);
    ggml_tensor * view_weights(ggml_context * ctx, int row, int k, int n, int n_tokens);

    // counts and callbacks of all ubatches that came since the last fold; the decode must have been synchronised
    void fold(const std::vector<int> & n_used_of_row, const std::vector<bool> & cropped, llama_moe_router_callback callback, void * user_data);

    // ids of a whole ubatch of the last decode, [n_rows][n_tokens][n_used]; null if there was no such ubatch
    const int32_t * choices(int ubatch, int & n_tokens) const;

    int n_rows   = 0;
    int n_used   = 0; // largest of any row: the stride of the log
    int n_expert = 0;
    std::vector<int32_t> counts; // [n_rows][n_expert]

private:
    struct device_log {
        ggml_backend_dev_t      dev;
        ggml_context_ptr        ctx;
        ggml_backend_buffer_ptr buf;
        ggml_tensor * ids     = nullptr; // I32, as the host's segment but of the rows of this device
        ggml_tensor * weights = nullptr; // F32
        std::vector<int> rows;
    };
    struct segment {
        int    n_tokens;
        int    n_outputs;
        size_t first;          // entry of (row 0, token 0)
        size_t first_output;   // where its tokens' flags begin in has_output
        bool   complete;       // it was computed, and by graphs that record (not a warm-up)
    };

    size_t device_offset(const device_log & d, int row, int n_tokens) const; // entries
    device_log & log_of(int row);
    ggml_tensor * view(ggml_context * ctx, int row, ggml_tensor * log, int64_t k, int64_t n, int n_tokens);

    std::vector<device_log> logs;
    std::vector<int>        log_of_row;
    ggml_backend_buffer_ptr buf; // page-locked if possible
    int32_t * host_ids     = nullptr;
    float   * host_weights = nullptr;
    size_t capacity = 0; // entries
    size_t used     = 0;
    bool   full     = false;
    void spread_cropped(const segment & s, int row, int n);

    std::vector<segment> segments;
    std::vector<int8_t>  has_output; // of all ubatches
    size_t n_folded = 0;
};
