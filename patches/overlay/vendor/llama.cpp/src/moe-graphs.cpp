#include "moe-graphs.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-memory.h"

#include <algorithm>

void moe_graph_cache::swap(entry & e) {
    std::swap(ctx.sched, e.sched);
    std::swap(ctx.gf_res_prev, e.res);
    std::swap(ctx.gf_res_prev_active, e.active);
}

void moe_graph_cache::restore() {
    if (current) {
        swap(*current);
        current = nullptr;
    }
}

void moe_graph_cache::clear() {
    restore();
    entries.clear();
}

bool moe_graph_cache::drop(int n_tokens) {
    const auto it = std::find_if(entries.begin(), entries.end(), [&](const auto & e) { return e->n_tokens == n_tokens && !e->failed; });
    if (it == entries.end()) {
        return false;
    }
    if (current == it->get()) {
        restore();
    }
    entries.erase(it);
    return true;
}

// reserves for the full context, so that the buffers do not grow while generating
bool moe_graph_cache::create(entry & e) {
    e.sched.reset(ggml_backend_sched_new(ctx.backend_ptrs.data(), ctx.backend_buft.data(), (int) ctx.backend_ptrs.size(),
            ctx.gf_res_reserve->get_max_nodes(), false, ctx.cparams.op_offload));
    swap(e);
    const auto mctx = ctx.memory->init_full();
    const uint32_t n_outputs = std::min((uint32_t) e.n_tokens, ctx.cparams.n_outputs_max);
    const uint32_t n_streams = ctx.cparams.kv_unified ? 1 : ctx.cparams.n_seq_max; // a graph has a part per stream of the KV cache
    const bool ok = mctx && ctx.graph_reserve(e.n_tokens, n_streams, n_outputs, mctx.get()) != nullptr;
    swap(e);
    if (!ok) {
        LLAMA_LOG_WARN("%s: no memory for a graph of %d tokens: batches of this width share the context's own graph\n", __func__, e.n_tokens);
        e.sched.reset();
    }
    return ok;
}

size_t moe_graph_cache::device_bytes(ggml_backend_dev_t dev) const {
    size_t n = 0;
    for (const auto & e : entries) {
        ggml_backend_sched_t sched = e.get() == current ? ctx.sched.get() : e->sched.get();
        for (ggml_backend_t b : ctx.backend_ptrs) {
            n += sched && ggml_backend_get_device(b) == dev ? ggml_backend_sched_get_buffer_size(sched, b) : 0;
        }
    }
    return n;
}

void moe_graph_cache::select(int n_tokens) {
    clock++;
    if (current && current->n_tokens == n_tokens) {
        current->last_use = clock;
        return;
    }
    restore();
    // what graph_reserve makes of the width; a graph over the limit would be one of upstream's path. Pipeline parallelism keeps
    // several copies in flight: there upstream's one graph stays.
    const int n_streams = ctx.cparams.kv_unified ? 1 : (int) ctx.cparams.n_seq_max;
    const int n_reserve = (n_tokens + n_streams - 1)/n_streams*n_streams;
    if (n_reserve > max_tokens || !ctx.memory || ctx.cparams.pipeline_parallel) {
        return;
    }
    auto it = std::find_if(entries.begin(), entries.end(), [&](const auto & e) { return e->n_tokens == n_tokens; });
    if (it == entries.end()) {
        if (entries.size() >= MAX_WIDTHS) {
            auto oldest = std::min_element(entries.begin(), entries.end(), [](const auto & a, const auto & b) { return a->last_use < b->last_use; });
            if (clock - (*oldest)->last_use < MIN_IDLE) {
                return; // more widths in use than are kept: making graphs anew would cost more than sharing the context's own
            }
            if ((*oldest)->sched) {
                ggml_backend_sched_synchronize((*oldest)->sched.get());
            }
            entries.erase(oldest);
        }
        auto e = std::make_unique<entry>();
        e->n_tokens = n_tokens;
        e->failed   = !create(*e);
        entries.push_back(std::move(e));
        it = entries.end() - 1;
    }
    (*it)->last_use = clock;
    if (!(*it)->failed) {
        current = it->get();
        swap(*current);
    }
}
