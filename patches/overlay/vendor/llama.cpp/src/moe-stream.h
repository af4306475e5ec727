#pragma once

// The in-stream execution of hybrid layers (ggml-moe-stream.h): the layer's products run in the main graph, on the device that computes
// the rest of the model; publish and join around them split the pairs and bring in what the pool of CPU threads computes meanwhile.
// On the CPU device the two operations are emulated, so that the protocol is tested where there is no GPU.

#include "moe-block.h"
#include "moe-pool.h"

#include "ggml-moe-stream.h"

#include <memory>
#include <mutex>
#include <string>
#include <vector>

struct llm_graph_context;
struct moe_layer;
struct llama_moe_ffn;
struct llama_moe_state;
struct moe_stream_client;

// the operations as `dev` has them, and its index in its registry; null: it has none (the CPU emulates them)
const ggml_moe_stream_api * moe_stream_api_of(ggml_backend_dev_t dev, int & index);
// makes a GGML_OP_CUSTOM node one of them; `owner`: GGML_MOE_STREAM_OWNER
void moe_stream_mark(ggml_tensor * t, uint64_t owner);

class moe_stream {
public:
    static constexpr int MAX_TOKENS = 32;
    static constexpr int LATE_FROM  = 4; // tokens: narrower batches leave room
    static constexpr int LATE_FIRST = 8; // so wide ones hardly do

    moe_stream(llama_moe_state & st, ggml_backend_dev_t dev);
    ~moe_stream();

    // before init: can the layer run in-stream? `device`: where its router is computed
    bool supports(const moe_layer & l, ggml_backend_dev_t device, std::string & reason) const;
    // memory for the layers whose `stream_reason` is empty
    bool init(std::string & error);

    // around decodes
    void begin_ubatch(int n_tokens);
    void launched(const std::vector<int> & rows); // these are computed in-stream by what has just been launched
    void sleep_through();                   // most of that: waiting for the device spins, on a core that the pool's or uploads need;
                                            // then what the next decode needs anyway is done, while the device still works
    bool end_decode(std::string & failure); // the device has been synchronised; false: the decode failed
    bool ready();                           // may the next decode use it?
    void map_changed() { map_dirty = true; }

    // stream lane
    void slots_changed();                              // of some layer: other memory, or another number
    void set_streaming(int max_experts, bool always);  // of a layer in a decode; always: also where the rates speak against it
    void set_look_ahead(int max_experts, float wrong); // of a layer, before it begins; wrong: share of guesses that are spoilt
    void set_values(const float * values);             // [n_rows][n_expert]: residents of low value make room. From any thread
    void changes(const moe_layer & l, std::vector<bool> & came, std::vector<bool> & left) const; // of a row, by the decode; before adopt
    void adopt();                                      // after a decode: what was streamed is resident
    bool in_two_passes() const { return n_tokens_last <= MAX_TOKENS && late_on[n_tokens_last]; } // batches of the last width
    void settle();                                     // the same, also in the middle of one: before layers that look at the host's map
    bool streams(const moe_layer & l) const;

    // the layer in the graph; F32 [n_embd, n_tokens]
    ggml_tensor * build(const llm_graph_context & g, moe_layer & l, const llama_moe_ffn & f);

    void reset_times();
    void add_times(moe_layer & l) const; // of the last ubatch, and the pool's, to the layer's perf
    size_t device_bytes() const;
    ggml_tensor * scale_of(ggml_context * ctx0, const moe_block & b) const; // down_scale, on the device: F32 [n_expert]
    moe_pool & threads() { return *pool; }

private:
    int  chunk_of(const moe_layer & l) const; // tokens that the layer's products take at once
    ggml_tensor * hot(const llm_graph_context & g, const moe_layer & l, ggml_tensor * x, ggml_tensor * published, ggml_tensor * slot_ids, int t0, int n) const;
    void upload_control(int n_tokens);
    bool late_row_ran() const;
    bool lane_is_used() const { return max_streamed > 0 || max_ahead > 0; }
    void choose_victims(bool for_next);
    void drop_stale_victims();
    void forget_victims();
    void consider_late();
    void set_late(int from, int to, bool on);
    double streaming_us(int row) const;
    void give_router(ggml_moe_stream_node & node, const moe_block & b) const;
    float ahead_now(int n_tokens) const;
    float expert_bytes_mean() const;
    void learn(int n_tokens);
    void learn_ahead(int n_tokens);
    int  grow_pool(int n_tokens); // to what a batch of so many tokens is given; returns that

    llama_moe_state &  st;
    ggml_backend_dev_t dev;
    const ggml_moe_stream_api * api = nullptr; // null: the CPU's emulation
    int  device_index = 0;                     // of dev in its registry
    int  n_cores = 1;
    int  late_row = -1;                        // of those launched, a few before the last; -1: there is nothing to wait for
    int64_t slept_us = 0;                      // the last time that the row ran
    int64_t slept_since = 0;                   // in the decode under way; 0: nobody has waited yet
    std::vector<uint64_t> clock_before;        // [n_rows] when each row's join ended before the launch
    bool map_dirty = true;
    bool running   = false;                    // in the decode under way
    int  n_ubatches = 0;                       // of that decode
    int  n_tokens_last = 0;                    // of its last ubatch

    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buf;      // all that follows, and the sequence number
    ggml_tensor *           control = nullptr; // I32: maps [n_rows][n_expert], victims [n_rows][MAX_VICTIMS], rates [N_RATES]
    ggml_tensor *           scale   = nullptr; // F32 [n_expert, n_rows], null if no layer has any
    int32_t *               maps_host    = nullptr; // the same as control, page-locked
    ggml_moe_stream_victim * victims_host = nullptr;
    float *                 rates_host   = nullptr;

    int  max_streamed  = 0;
    bool stream_always = false;
    int   max_ahead    = 0;
    float ahead_wrong  = 0;
    std::mutex             values_mutex;
    std::vector<float>     values;           // [n_rows][n_expert]
    bool                   victims_chosen = false; // by these values; guarded by the mutex
    std::vector<int64_t>   last_used;        // [n_rows][n_expert], in decodes
    int64_t                n_decodes = 0;
    std::vector<uint32_t>  counters_before;  // [n_rows][N_COUNTERS] when the decode began, or was settled
    float                  us_pool_byte = 0, us_link_byte = 0;
    std::vector<float>     us_hot;           // [tokens], measured, 0: not yet
    float                  us_ahead_byte = 0;
    std::vector<float>     us_rest;          // [tokens] from a layer's end to the next publish, if that needs not wait for the look-ahead
    std::vector<float>     us_ahead;         // [tokens] from publish to there: what the look-ahead has
    std::vector<float>     ahead_right;      // [tokens] share of its guesses that were right
    std::vector<int64_t>   ahead_tried;      // [tokens] n_decodes when it last made any

    std::vector<bool>      late_on;          // [tokens] such batches are computed in two passes
    int64_t                late_since = -1;  // n_decodes when that changed; negative: it was never considered
    std::vector<float>     n_crowded;        // [tokens] GGML_MOE_STREAM_CROWDED of a row and decode
    std::vector<int>       n_considered;     // [tokens] decodes in that
    bool                   one_whole = false; // the decode had one ubatch, in-stream and not broken off

    void * side = nullptr;                   // ggml_moe_stream_channel::side
    std::shared_ptr<moe_pool>          pool;
    std::shared_ptr<moe_stream_client> client;
};
