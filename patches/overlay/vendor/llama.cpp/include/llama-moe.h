#pragma once

// Per-expert residency for Mixture-of-Experts models (moespac_llamacpp).
//
// A context with the feature attached computes the routed experts of a small batch on two processors at the same time:
// experts that a *slot* of the device holds are computed there ("hot"), all others on CPU threads from host memory ("cold").
// The caller decides which experts are resident: it starts uploads (load), drops experts (evict) and makes finished uploads
// visible (publish), always between two decodes.
//
// Rows. Everything is indexed by `row`. Row il is the MoE block of layer il, MTP layers included (a dense layer has an empty row);
// if a layer has a second MoE block (GroveMoE), that one has a row of its own after all layers. A row that cannot run hybrid takes
// upstream's path and says why (llama_moe_row_info::fallback).
//
// Threads. As for the rest of the API, a context belongs to one thread at a time. Between llama_decode and llama_synchronize
// (or reading logits) a decode is in flight: evict, publish, set_slots, set_execution, set_streaming, set_look_ahead and set_router_callback
// are refused then with LLAMA_MOE_IN_FLIGHT; load, sync, residency (and load_many, residency_table) and set_values are allowed, also from
// another thread. Attach and detach wait for the decode.
//
// Errors come back as codes; llama_moe_error gives the sentence. Nothing here aborts the process.

#include "llama.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

    enum llama_moe_status {
        LLAMA_MOE_OK                =   0,
        LLAMA_MOE_INVALID_ARGUMENT  =  -1,
        LLAMA_MOE_NOT_ATTACHED      =  -2,
        LLAMA_MOE_ALREADY_ATTACHED  =  -3,
        LLAMA_MOE_NO_MOE_LAYERS     =  -4,
        LLAMA_MOE_NO_DEVICE         =  -5, // the device has no backend, or the CPU backend lacks what the cold lane needs
        LLAMA_MOE_NO_DEVICE_MEMORY  =  -6,
        LLAMA_MOE_OUT_OF_RANGE      =  -7, // row or expert
        LLAMA_MOE_UNSUPPORTED       =  -8, // the row takes upstream's path; llama_moe_row_info::fallback says why
        LLAMA_MOE_ALREADY_RESIDENT  =  -9, // resident, or its upload is under way
        LLAMA_MOE_NO_FREE_SLOT      = -10,
        LLAMA_MOE_NOT_RESIDENT      = -11,
        LLAMA_MOE_IN_FLIGHT         = -12, // a decode is in flight: call llama_synchronize first
        LLAMA_MOE_FAILED            = -13, // the device lane failed (everything is computed on the CPU then), or attaching did
    };

    // How a hybrid layer is executed. In-stream: the hot experts in the context's own graph on the device, the cold ones on a pool of
    // threads of the process, nothing waits for the host in between (CUDA). Portable: a CPU operation per layer that drives the device
    // through a backend of its own (any device). Same contract, same results up to rounding.
    enum llama_moe_execution {
        LLAMA_MOE_AUTO      = 0, // in-stream where the device and the layer allow it, else portable
        LLAMA_MOE_PORTABLE  = 1,
        LLAMA_MOE_IN_STREAM = 2, // as AUTO, but an error if no layer can; on the CPU device it is emulated, for tests
    };

    struct llama_moe_params {
        ggml_backend_dev_t device;  // where the slots live; NULL: the first GPU, else a second instance of the CPU backend
        int32_t execution;          // enum llama_moe_execution
        int32_t pool_threads;       // in-stream: threads for the CPU part; 0: the context's n_threads, less the cores that must stay free
        int32_t timeout_ms;         // in-stream: a layer's CPU part that takes longer has failed
        int32_t max_batch_tokens;   // 1 to 512: batches of up to this many tokens run hybrid; for larger ones see prompt_lane
        int32_t stream_experts;     // in-stream: so many experts of a row may cross the link during a decode and be computed on the device, 0 to 8
        int32_t look_ahead;         // in-stream: and so many while the row before is computed, 0 to 8; see llama_moe_set_look_ahead
        bool    own_kernels;        // cold lane: our multi-column kernels where they exist, else ggml's vec_dot
        bool    cache_graphs;       // keep one graph (and its compute buffers) per batch width, so that a change costs nothing
        bool    perf;               // take times; counters of pairs and experts are always taken
        bool    whole_layers;       // a row whose experts are all resident takes upstream's path, with the slots as its weights
        bool    prompt_lane;        // in-stream: batches over max_batch_tokens are computed on the device, with what is resident from the slots
                                    // and the rest copied from page-locked memory meanwhile. It takes device memory, unless every expert has
                                    // a slot. Otherwise, and in rows that cannot, they take upstream's path, which copies every expert in use
        int32_t prompt_share;       // that memory is 1/prompt_share of the experts of the largest layer, 1 to 16; 0: chosen. Less
                                    // memory is more, and smaller, copies and products
    };

    // what a row is
    struct llama_moe_row_info {
        int32_t il;             // layer, -1: the row is empty (dense layer)
        int32_t n_expert;
        int32_t n_expert_used;  // experts per token
        int32_t n_slots;
        int64_t expert_bytes;   // bytes of one expert: what a slot takes and an upload moves
        bool    hybrid;
        bool    in_stream;      // the in-stream execution computes it now (batches of up to 32 tokens)
        bool    whole;          // every expert is resident, each in the slot of its number: upstream's path, with the slots as weights
        bool    streams;        // in-stream: experts of the row can cross the link during a decode
        bool    two_passes;     // and for batches of the last one's width also into slots whose residents the batch uses, between two passes:
                                // of 8 or more tokens to begin with, then by measured rates and from 4 tokens on
        bool    pinned;         // the experts' host memory is page-locked for the device (uploads at full link speed)
        const char * fallback;  // why the row takes upstream's path; "" if it runs hybrid
        const char * portable;  // why a hybrid row is not computed in-stream; "" if it is
        const char * kernel;    // cold kernels of gate/up and down, e.g. "avx512-vnni, avx512-vnni"
    };

    // sums since the last llama_moe_perf_reset; times in microseconds, 0 without llama_moe_params::perf
    struct llama_moe_perf_data {
        int64_t n_calls;        // hybrid computations of the row
        int64_t n_tokens;
        int64_t n_hot_pairs;    // (token, expert) pairs computed on the device
        int64_t n_cold_pairs;
        int64_t n_hot_experts;  // distinct experts per call, summed
        int64_t n_cold_experts;
        int64_t n_loads;        // uploads that landed
        int64_t n_load_bytes;
        int64_t n_streamed_experts; // of the cold ones, those that crossed the link when the row had chosen them
        int64_t n_ahead_experts;    // that crossed it before, while the row before was computed
        int64_t n_ahead_right;      // of these, those that the row then chose
        int64_t n_streamed_pairs;   // of the cold pairs, those of experts that crossed the link in either way; the others were computed by the CPU
        double  us_plan;        // splitting the pairs
        double  us_launch;      // portable: starting the device lane (thread 0)
        double  us_cold;        // cold lane (portable: after the launch; in-stream: from the request on, with us_plan)
        double  us_wait;        // portable: the CPU waiting for the device after the cold lane; in-stream: the device waiting for the pool
        double  us_total;       // in-stream: from publish to the end of join, by the device's clock
        double  us_stream;      // in-stream: from publish until what was streamed had arrived, by the device's clock
        double  us_hot;         // in-stream: from there, or from publish, to join
        double  us_rest;        // in-stream: from join to the next layer's publish
    };

    enum llama_moe_expert_state {
        LLAMA_MOE_COLD      = 0,
        LLAMA_MOE_UPLOADING = 1, // invisible until published
        LLAMA_MOE_RESIDENT  = 2,
    };

    // ids, weights: [n_tokens][n_expert_used], in the order in which the tokens were decoded; valid during the call only
    typedef void (*llama_moe_router_callback)(
            void * user_data, int32_t row, int32_t n_tokens, int32_t n_expert_used, const int32_t * ids, const float * weights);

    LLAMA_API struct llama_moe_params llama_moe_default_params(void);

    // Finds the context's MoE blocks and attaches; every row starts with 0 slots.
    LLAMA_API int32_t llama_moe_attach(struct llama_context * ctx, struct llama_moe_params params);
    // Frees all device memory of the feature; the context is upstream's again. A no-op when nothing is attached.
    LLAMA_API int32_t llama_moe_detach(struct llama_context * ctx);

    // For a context to which nothing is attached (a draft model's, dense or not): one graph and its compute buffers per batch width up to
    // max_tokens are kept, so that changing the width costs nothing. 0: no longer. ALREADY_ATTACHED: attaching keeps graphs too.
    LLAMA_API int32_t llama_moe_keep_graphs(struct llama_context * ctx, int32_t max_tokens);

    // The sentence for the last error of this thread.
    LLAMA_API const char * llama_moe_error(void);

    LLAMA_API int32_t llama_moe_n_rows  (const struct llama_context * ctx); // 0: not attached
    LLAMA_API int32_t llama_moe_n_expert(const struct llama_context * ctx); // largest number of experts of any row
    LLAMA_API int32_t llama_moe_row     (const struct llama_context * ctx, int32_t row, struct llama_moe_row_info * info);

    // n_slots[n_rows]; 0 for rows that are empty or not hybrid. Residents whose slot number is still there stay; the others are
    // evicted. Without room for both, the old slots of a row that shrinks go first and its residents are uploaded again. A row that
    // cannot grow keeps what it had; the rest is done.
    LLAMA_API int32_t llama_moe_set_slots(struct llama_context * ctx, const int32_t * n_slots);
    // Changes the execution; graphs are built anew, and what set_values said is forgotten. NO_DEVICE_MEMORY: the portable execution has
    // no room for its buffers, and nothing changed.
    LLAMA_API int32_t llama_moe_set_execution(struct llama_context * ctx, int32_t execution);
    // Why the last decode failed after llama_decode had returned, "" if it did not; waits for the decode. Its outputs are NaN then, and the
    // KV cache holds what must not be used: clear it (llama_memory_clear with data). The context stays usable. A decode that follows
    // without anybody having waited for the failed one fails too.
    LLAMA_API const char * llama_moe_failure(struct llama_context * ctx);

    // The stream lane of the in-stream execution. While the CPU computes cold experts of a row, up to max_experts others cross the link into
    // slots whose residents the batch does not use, and stay there. How many pays is decided by measured rates (always: it is not
    // asked). Residents of least value make room, of equal values those used longest ago. values[n_rows][n_expert]; may be set while a
    // decode is in flight, also from another thread; it counts from the next decode on. Graphs of two passes stay as they are while 0 may be
    // streamed, for whoever turns it on again.
    LLAMA_API int32_t llama_moe_set_streaming(struct llama_context * ctx, int32_t max_experts, bool always);
    LLAMA_API int32_t llama_moe_set_values   (struct llama_context * ctx, const float * values);
    // The look-ahead of the stream lane: what a row will need is guessed from the input of the row before, by the row's own router, and
    // brought while that one is computed: up to max_experts, as many as measured rates let arrive in time, into the same slots. It rests
    // while most guesses are wrong. wrong: so large a share of the guesses is replaced by random ones (0; for measurements with models
    // that are easier to foresee than real ones).
    LLAMA_API int32_t llama_moe_set_look_ahead(struct llama_context * ctx, int32_t max_experts, float wrong);

    // Bytes that slots, the lanes' buffers and the graphs kept per width take on the device now.
    LLAMA_API int64_t llama_moe_device_bytes(const struct llama_context * ctx);
    // Of these, what prompts need as long as not every expert has a slot.
    LLAMA_API int64_t llama_moe_prompt_memory(const struct llama_context * ctx);

    // Starts an upload into a free slot and returns at once. The expert stays cold until a publish after the upload landed.
    LLAMA_API int32_t llama_moe_load (struct llama_context * ctx, int32_t row, int32_t expert);
    // Drops a resident at once, or withdraws an upload.
    LLAMA_API int32_t llama_moe_evict(struct llama_context * ctx, int32_t row, int32_t expert);
    // The same for n experts at once, in order: expert experts[i] of row rows[i]. status[n] gets what the single call would have returned for
    // each; it may be NULL. One that is refused does not keep the others from being done. Returns how many were done, or an
    // error (< 0) if none was tried: NOT_ATTACHED, INVALID_ARGUMENT, for evict_many IN_FLIGHT. llama_moe_error then tells of that, or of
    // the first that was refused.
    LLAMA_API int32_t llama_moe_load_many (struct llama_context * ctx, int32_t n, const int32_t * rows, const int32_t * experts, int32_t * status);
    LLAMA_API int32_t llama_moe_evict_many(struct llama_context * ctx, int32_t n, const int32_t * rows, const int32_t * experts, int32_t * status);
    // Makes landed uploads visible; returns how many (>= 0) or an error (< 0). Never waits.
    LLAMA_API int32_t llama_moe_publish(struct llama_context * ctx);
    // Waits until all started uploads have landed.
    LLAMA_API int32_t llama_moe_sync(struct llama_context * ctx);
    // states[n_expert of the row]: enum llama_moe_expert_state
    LLAMA_API int32_t llama_moe_residency(const struct llama_context * ctx, int32_t row, uint8_t * states);
    // The same for all rows at once, states[n_rows][n_expert]; LLAMA_MOE_COLD where there is no expert or no slot.
    LLAMA_API int32_t llama_moe_residency_table(const struct llama_context * ctx, uint8_t * states);

    // Router counts of the last decode, [n_rows][n_expert], summed over its ubatches; waits for the decode. The pointer stays
    // valid, and its numbers until the next decode, while the feature is attached. NULL: not attached.
    // Most models compute their last layer only for tokens whose logits were asked for: its row counts those tokens alone.
    LLAMA_API const int32_t * llama_moe_counts(struct llama_context * ctx);
    // The experts that each token of the last decode chose, one ubatch (0, 1, ...) at a time: [n_rows][n_tokens][n_expert_used] with
    // the sizes written to the pointers, -1: not computed. Waits for the decode; valid until the next one. NULL: no such ubatch.
    LLAMA_API const int32_t * llama_moe_choices(struct llama_context * ctx, int32_t ubatch, int32_t * n_tokens, int32_t * n_expert_used);
    // Called for every row of every ubatch when a decode has been synchronised; NULL ends it.
    LLAMA_API int32_t llama_moe_set_router_callback(struct llama_context * ctx, llama_moe_router_callback callback, void * user_data);

    LLAMA_API int32_t llama_moe_perf      (const struct llama_context * ctx, int32_t row, struct llama_moe_perf_data * data);
    LLAMA_API int32_t llama_moe_perf_reset(struct llama_context * ctx, bool take_times);

    // How often a decode found its graph ready, and how often one had to be built, since attach.
    LLAMA_API void llama_moe_graph_stats(const struct llama_context * ctx, int64_t * n_reused, int64_t * n_built);

    // Bytes that the prompt lane has copied since it was opened: from slots; from host memory; of these before the layer's choice was
    // known; and of these last those that it did not choose.
    LLAMA_API void llama_moe_prompt_bytes(const struct llama_context * ctx, int64_t * from_slots, int64_t * over_link, int64_t * ahead, int64_t * in_vain);

    // Bytes of the GGUF's experts that live in host memory, and of these the page-locked ones.
    LLAMA_API void llama_moe_host_bytes(const struct llama_context * ctx, int64_t * total, int64_t * pinned);

    // For tests: thread `thread` of the process's pool sleeps that long in its next request; sleep_ms < 0: it ends for good.
    LLAMA_API int32_t llama_moe_inject_pool_fault(struct llama_context * ctx, int32_t thread, int32_t sleep_ms);
    // Threads of the process's pool; 0: no context computes in-stream.
    LLAMA_API int32_t llama_moe_pool_threads(const struct llama_context * ctx);

    // For who samples from a large vocabulary: the tokens whose logits reach an edge that lies not far below the n-th largest of the n_vocab
    // logits, with their logits, in order of their ids; at least n. Looks at all logits once and sorts nothing. Returns how many were
    // written to out[n_out], or 0 where there is no cheap edge: fewer than 16,384 logits, n above 1,024, a largest logit that is not
    // finite, NaN, or no room for all that reach it. No context is needed.
    struct llama_moe_search {
        float gap;      // INFINITY at first; kept from search to search: how far below the largest logit the last edge lay, as a first guess
        float near;     // in: this far below the largest logit a token is near it
        float edge;     // out
        int32_t n_near; // out: how many of the tokens found are near the largest, itself among them
        llama_token best;
    };
    LLAMA_API int32_t llama_moe_likeliest(const float * logits, int32_t n_vocab, int32_t n, struct llama_moe_search * search, llama_token_data * out, int32_t n_out);

    // The instruction set of our cold kernels on this machine ("avx512-vnni", "avx2", "none").
    LLAMA_API const char * llama_moe_kernel_isa(void);
    // Caps it for tests and comparisons: 0 none, 1 avx2, 2 avx512-vnni; returns the level in force. Takes effect at attach.
    LLAMA_API int32_t llama_moe_set_kernel_limit(int32_t level);

#ifdef __cplusplus
}
#endif
