#pragma once

// A context's hybrid MoE layers: what ties the lanes, the moves, the router log and the graphs together. Owned by llama_context,
// whose methods call the hooks below (see patches/).

#include "moe-block.h"
#include "moe-cold.h"
#include "moe-device.h"
#include "moe-graphs.h"
#include "moe-observe.h"
#include "moe-prompt.h"
#include "moe-residency.h"
#include "moe-stream.h"

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

struct llama_context;
struct llm_graph_context;

// what build_moe_ffn knows when it has chosen the experts and their weights
struct llama_moe_ffn {
    ggml_tensor * cur;     // [n_embd, n_tokens]
    ggml_tensor * ids;     // [n_used, n_tokens], strided
    ggml_tensor * weights; // [1, n_used, n_tokens]
    moe_tensors   tensors; // with merged gate and up in MOE_GATE
    bool merged;
    ggml_tensor * down_scale; // F32 [n_expert] or null
    bool scaled;           // per-expert scale tensors of gate or up
    bool weight_before;
    bool precise;          // a precision override on one of the products
    int  type_op;          // llm_ffn_op_type
    int  il;

    // the tensors that build_moe_ffn goes on with: a layer that is whole on the device has others than the model
    void give_back(ggml_tensor *& gate, ggml_tensor *& up, ggml_tensor *& gate_up, ggml_tensor *& down,
                   ggml_tensor *& gate_b, ggml_tensor *& up_b, ggml_tensor *& gate_up_b, ggml_tensor *& down_b) const {
        (merged ? gate_up : gate)     = tensors[MOE_GATE];
        (merged ? gate_up_b : gate_b) = tensors[MOE_GATE_B];
        if (!merged) {
            up   = tensors[MOE_UP];
            up_b = tensors[MOE_UP_B];
        }
        down   = tensors[MOE_DOWN];
        down_b = tensors[MOE_DOWN_B];
    }
};

struct moe_router {
    const ggml_tensor * gate = nullptr;
    const ggml_tensor * bias = nullptr; // of the scores, null: none
    bool sigmoid = false;               // of the gate's product, before the bias
};

struct moe_layer {
    struct llama_moe_state * state = nullptr;
    moe_block           block;
    moe_slots           slots;
    moe_device_graphs   graphs;
    llama_moe_perf_data perf = {};
    bool        packed     = false; // the op gets one packed input: the router's device is not the CPU
    bool        pinned     = false;
    bool        lora       = false; // the graph built last has a LoRA adapter on the experts
    bool        whole_fits = false; // its router is computed on the device of the slots
    bool        whole      = false; // every slot holds the expert of its number: upstream's path, with the slots as weights
    bool        cropped    = false; // the model computes this block for tokens with an output only (most models' last layer)
    std::string kernels;
    std::string fallback_now;       // block.fallback, or the LoRA sentence
    std::string stream_reason;      // why the layer cannot run in-stream; empty: it can
    std::string prompt_reason;      // why its prompts are not staged; empty: they can be
};

struct llama_moe_state {
    llama_moe_state(llama_context & ctx, const llama_moe_params & params);
    ~llama_moe_state();

    int32_t attach(std::string & error); // llama_moe_status
    int32_t set_execution(int32_t execution, std::string & error);

    // hooks of llama_context
    void begin_decode();
    void begin_ubatch(const llama_ubatch & ubatch);
    bool end_ubatch();       // false: the portable execution failed, `failure` says how
    void before_synchronize();
    void on_synchronize();
    void fail(const std::string & what); // from inside a decode: it ends with an error
    void drop_graphs() { graphs.clear(); }

    // what the executions ask about the context
    ggml_backend_t backend_of(ggml_backend_dev_t dev) const; // the context's own instance
    int  n_threads_for(int n_tokens) const;
    bool is_second_block(const moe_block & block) const;     // of its layer
    int  n_layer() const;                                    // without MTP layers
    moe_router router_of(const moe_block & block) const;     // empty for a second block

    // hook of build_moe_ffn; null: take upstream's path
    // (of a layer that is whole on the device with the slots in place of `tensors`)
    ggml_tensor * build(const llm_graph_context & g, llama_moe_ffn & f);

    // API
    moe_layer * layer(int row) const { return row >= 0 && row < (int) rows.size() ? rows[row] : nullptr; }
    int32_t set_slots(const int32_t * n_slots, std::string & error);
    void    set_callback(llama_moe_router_callback callback, void * user_data);
    void    placement_changed(); // after publish, evict and new slots
    void    passes_changed() { changed_graphs(); } // layers are computed in another number of passes
    void    passes_changed(int n_tokens);          // those of batches of this width
    int64_t device_bytes() const;
    uint32_t n_more_nodes() const { return prompt ? (uint32_t) prompt->n_nodes() : 0; } // in a graph, than upstream expects

    llama_context &  ctx;
    llama_moe_params params;

    // identifies the topology of graphs built for this state; no two states of a process share one
    // (one with staged prompts lasts for one ubatch: see ggml-moe-prompt.h)
    uint64_t epoch = 0;

    bool graphs_only   = false; // no layer is looked at: llama_moe_keep_graphs
    bool discovering   = false;
    bool in_flight     = false;
    bool device_failed = false;
    std::string failure;             // of the last decode; "": none

    std::vector<std::unique_ptr<moe_layer>>         layers; // in the order in which the model builds them
    std::vector<moe_layer *>                        rows;   // null: empty row
    std::unordered_map<const ggml_tensor *, moe_layer *> by_down;

    llama_moe_router_callback callback = nullptr;
    void * callback_data = nullptr;

    moe_router_log  log;
    moe_graph_cache graphs;
    int64_t n_ubatches = 0;
    int64_t n_reused   = 0; // ubatches that found their graph ready
    int64_t reused_before = 0; // the context's counter when the current ubatch began

    // the CPU op; one runs at a time
    moe_barrier barrier;
    std::unique_ptr<moe_cold_lane>   cold;
    std::unique_ptr<moe_device_lane> device;
    std::vector<moe_hot_pair> hot;
    std::vector<int32_t> count_of, next_of; // per expert, scratch
    const float * hot_sum = nullptr;

    std::unique_ptr<moe_stream> stream; // null: no layer can run in-stream
    bool  stream_always = false;        // what the stream lane has been told, beside params: another stream is told the same
    float ahead_wrong   = 0;
    bool stream_on  = false;            // layers that can, do
    bool prompt_set_aside = false;      // not needed as long as every expert has a slot
    std::unique_ptr<moe_prompt> prompt; // null: batches over the hybrid width take upstream's path
    bool lane_ready  = false;           // the portable execution has its buffers
    bool lane_failed = false;           // it got none when it was to stand in

    std::unique_ptr<moe_residency> residency; // last: its thread ends before the slots go

private:
    void discover(const llm_graph_context & g, const llama_moe_ffn & f);
    bool runs_hybrid(const moe_layer & l, int n_tokens) const;
    bool runs_in_stream(const moe_layer & l, int n_tokens) const;
    bool runs_staged(const moe_layer & l, int n_tokens) const;
    bool may_be_staged(const moe_layer & l, int n_tokens) const;
    bool runs_whole(const moe_layer & l) const;
    bool cpu_idles(int n_tokens) const;
    bool only_experts_on_host() const;
    void restore_threads();
    void use_stream(bool on);
    bool reserve_lane(std::string & error);
    void open_prompt_lane();
    void count_pairs();
    void poison_outputs();
    std::vector<bool> cropped_rows() const;
    ggml_tensor * build_op(const llm_graph_context & g, moe_layer & l, const llama_moe_ffn & f);
    void new_epoch();
    uint64_t lasting_epoch = 0; // of all graphs without staged prompts
    void changed_graphs();

    int32_t n_threads = 0, n_threads_batch = 0; // the context's, while a decode in-stream has them at 1
    bool    threads_set = false;
    mutable int only_experts = -1;      // only_experts_on_host(), once known
};

// the CPU op of a hybrid layer (ggml_custom_op_t); user_data: moe_layer
void moe_op(ggml_tensor * dst, int ith, int n_threads, void * user_data);
