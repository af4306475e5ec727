#pragma once

// A graph per batch width. Upstream keeps one decode graph and rebuilds it whenever the number of tokens changes, as the width of
// a verify batch does from step to step; a CUDA graph then has to be captured anew as well. Here each width up to the limit
// has a scheduler and a graph of its own, which are swapped into the context while that width is decoded.

#include "llama-graph.h"

#include "ggml-cpp.h"

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

struct llama_context;

class moe_graph_cache {
public:
    moe_graph_cache(llama_context & ctx, int max_tokens) : ctx(ctx), max_tokens(max_tokens) {}

    void select(int n_tokens); // swaps in the width's graph; the context's own for widths over the limit
    void restore();            // the context's own graph
    void clear();              // restores and frees all others
    bool drop(int n_tokens);   // frees the width's graph; false: it has none of its own
    size_t device_bytes(ggml_backend_dev_t dev) const; // compute buffers of all widths but the context's own

private:
    struct entry {
        int      n_tokens;
        uint64_t last_use = 0;
        bool     failed   = false; // no memory: the context's own graph serves this width
        // what is swapped with the context's members
        ggml_backend_sched_ptr              sched;
        std::array<llm_graph_result_ptr, 2> res;
        llm_graph_result *                  active = nullptr;
    };

    void swap(entry & e);
    bool create(entry & e);

    static constexpr size_t   MAX_WIDTHS = 16;
    static constexpr uint64_t MIN_IDLE   = 64; // selections: a width that was used since then is not dropped for another one

    llama_context & ctx;
    int      max_tokens;
    uint64_t clock = 0;
    std::vector<std::unique_ptr<entry>> entries;
    entry * current = nullptr; // swapped in
};
