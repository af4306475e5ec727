#pragma once

// The prompt lane (ggml-moe-prompt.h): batches over the hybrid width, on the device that the in-stream execution uses. Upstream has the
// scheduler copy all experts in use from host memory, layer by layer, and wait for each; here the resident ones come from their
// slots, and the others cross the link while the device computes. The decisions below are taken when an operation is launched;
// moe-prompt.cu carries them out, and on the CPU device the emulation does, which spoils all that should not be read.

#include "moe-block.h"

#include "ggml-moe-prompt.h"

#include <array>
#include <memory>
#include <string>
#include <vector>

// staging memory is at least this part of a layer's experts
constexpr int MOE_MAX_PROMPT_SHARE = 16;

struct llm_graph_context;
struct moe_layer;
struct llama_moe_ffn;
struct llama_moe_state;

class moe_prompt {
public:
    moe_prompt(llama_moe_state & st, ggml_backend_dev_t dev);
    ~moe_prompt();

    // before init: may the layer's prompts be staged? It must be able to run in-stream
    bool supports(const moe_layer & l, std::string & reason) const;
    // memory for the layers whose `prompt_reason` is empty: about 1/share of the largest layer's experts, 0: chosen
    bool init(int n_ubatch, int share, std::string & error);

    // around decodes
    void begin_ubatch();
    void settle(); // no copy is under way any more: before slots change

    // the layer in the graph, with upstream's own operations; F32 [n_embd, n_tokens]
    ggml_tensor * build(const llm_graph_context & g, moe_layer & l, const llama_moe_ffn & f);

    size_t device_bytes() const;
    int    n_nodes() const; // at most so many more in a graph than upstream's own

    // copied since init
    struct {
        int64_t from_slots = 0;
        int64_t over_link  = 0;
        int64_t ahead      = 0; // of those over the link: before their layer asked
        int64_t in_vain    = 0; // of those ahead: the layer did not use them
    } bytes;

private:
    // rows of one part of every expert
    struct piece {
        int    part   = 0;
        int    buffer = 0;
        size_t offset = 0; // in the expert's part
        size_t stride = 0; // bytes of an expert
        size_t tail   = 0; // bytes behind the last one that the device may read
        ggml_tensor * tensor = nullptr; // in its buffer
        ggml_moe_prompt_node stage   = {};
        ggml_moe_prompt_node release = {};
    };
    struct staged_layer {
        moe_layer * l = nullptr;
        std::vector<piece> pieces; // in the order of their products
        const piece * next_in(int buffer, size_t from) const; // the first one for the buffer from that index on, or null
        int      n_tokens = 0;  // of the graph built last; fewer than the ubatch's in a cropped layer
        uint64_t built    = 0;  // the ubatch whose graph has the layer
        bool     known    = false;    // `count` is of this ubatch
        std::vector<int32_t> count;   // [n_expert] how many tokens chose it
        std::vector<uint8_t> likely;  // [n_expert] to be used by the next ubatch too
        int      n_before = 0;        // tokens of the ubatch that says so
        bool foresees() const;
    };
    struct staging {
        const piece * holds = nullptr; // whose experts lie there, or are on their way
        std::vector<uint8_t> there;    // [n_expert]
        char * data = nullptr;
        size_t size = 0;
        bool under_way = false;               // copies that no launched product waits for yet
    };

    static bool wants_ids(const ggml_moe_prompt_node * node);
    static void work(const ggml_moe_prompt_node * node, const int32_t * ids, int64_t n_ids, ggml_moe_prompt_work * work);
    static void emulate(ggml_tensor * dst, int ith, int n_threads, void * user_data);

    staged_layer & layer_of(const ggml_moe_prompt_node & node) const;
    void cut(staged_layer & s, size_t piece_bytes); // into pieces
    staged_layer * after(const staged_layer & s) const; // the layer that is computed next; null: none
    template<typename used_t>
    void bring(const staged_layer & s, const piece & p, const used_t & used); // what is used and not there, to `copies`
    void choose_likely(staged_layer & s);
    void count_in_vain(const staged_layer & s);
    ggml_tensor * node(const llm_graph_context & g, ggml_tensor * a, ggml_tensor * b, ggml_moe_prompt_node & node) const;

    llama_moe_state &  st;
    ggml_backend_dev_t dev;
    const ggml_moe_prompt_api * api = nullptr; // null: the CPU's emulation
    int    device_index = 0;
    void * device       = nullptr;

    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buf;
    ggml_backend_buffer_ptr buf_ids; // page-locked
    std::array<staging, GGML_MOE_PROMPT_BUFFERS> buffers;
    std::vector<std::unique_ptr<staged_layer>> layers; // by row, null: not staged
    std::vector<ggml_moe_prompt_copy> copies;
    uint64_t ubatch = 0;
    bool     first  = false; // nothing of the ubatch was launched yet
};
