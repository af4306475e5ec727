#include "moe-prompt.h"

#include "moe-state.h"

#include "llama-context.h"
#include "llama-graph.h"
#include "llama-impl.h"

#include "ggml.h"

#include <algorithm>
#include <cstring>

static_assert(GGML_MOE_PROMPT_PARTS == MOE_N_PARTS, "one staging tensor per part");

// Products in the order of their parts.
static constexpr int ORDER[] = { MOE_GATE, MOE_GATE_B, MOE_UP, MOE_UP_B, MOE_DOWN, MOE_DOWN_B };

moe_prompt::moe_prompt(llama_moe_state & st, ggml_backend_dev_t dev) : st(st), dev(dev) {
    const ggml_moe_stream_api * stream = moe_stream_api_of(dev, device_index);
    api = stream ? stream->prompt : nullptr;
}

moe_prompt::~moe_prompt() {
    if (device) {
        api->close(device);
    }
}

bool moe_prompt::supports(const moe_layer & l, std::string & reason) const {
    const bool cpu = ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU;
    if (!l.block.hybrid()) {
        reason = l.block.fallback;
    } else if (!l.stream_reason.empty()) {
        reason = l.stream_reason;
    } else if (!cpu && !api) {
        reason = std::string(ggml_backend_dev_name(dev)) + " has no operations for it";
    } else if (!cpu && !l.pinned) {
        reason = "the experts' host memory is not page-locked";
    }
    return reason.empty();
}

//
// memory
//

static ggml_tensor * new_part(ggml_context * ctx, const ggml_tensor * host, int part, int n_expert) {
    return part >= MOE_GATE_B ? ggml_new_tensor_2d(ctx, host->type, host->ne[0], n_expert)
                              : ggml_new_tensor_3d(ctx, host->type, host->ne[0], host->ne[1], n_expert);
}

bool moe_prompt::init(int n_ubatch, std::string & error) {
    ggml_backend_buffer_type_t buft = ggml_backend_dev_buffer_type(dev);
    ctx.reset(ggml_init({ ggml_tensor_overhead()*MOE_N_PARTS*(st.rows.size() + 1), nullptr, true }));
    layers.resize(st.rows.size());
    int n_used = 0;
    for (moe_layer * l : st.rows) {
        if (!l || !l->prompt_reason.empty()) {
            continue;
        }
        auto s = std::make_unique<staged_layer>();
        s->l = l;
        s->count.resize(l->block.n_expert);
        s->likely.resize(l->block.n_expert);
        n_used = std::max(n_used, l->block.n_used);
        for (int p = 0; p < MOE_N_PARTS; p++) {
            if (const ggml_tensor * h = l->block.host[p]) {
                s->tensors[p] = new_part(ctx.get(), h, p, l->block.n_expert);
                ggml_format_name(s->tensors[p], "moe_staging-%d.%d", l->block.row, p);
                part_size[p] = std::max(part_size[p], GGML_PAD(ggml_backend_buft_get_alloc_size(buft, s->tensors[p]), (size_t) 256));
            }
        }
        layers[l->block.row] = std::move(s);
    }

    size_t size = 0;
    for (size_t n : part_size) {
        size += n;
    }
    buf.reset(ggml_backend_buft_alloc_buffer(buft, size));
    if (!buf) {
        error = "no memory on " + std::string(ggml_backend_dev_name(dev)) + " for it (" + std::to_string(size) + " bytes)";
        return false;
    }
    buf_ids.reset(ggml_backend_buft_alloc_buffer(st.device->host_buft, sizeof(int32_t)*n_used*n_ubatch));
    device = buf_ids && api ? api->open(device_index) : nullptr;
    if (!buf_ids || (api && !device)) {
        error = "no page-locked memory or no streams for it";
        return false;
    }
    ggml_backend_buffer_clear(buf.get(), api ? 0 : 0xff);
    ggml_backend_buffer_set_usage(buf.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    char * data = (char *) ggml_backend_buffer_get_base(buf.get());
    for (int p = 0; p < MOE_N_PARTS; p++) {
        part_data[p] = data;
        data += part_size[p];
        parts[p].there.resize(st.log.n_expert);
    }

    for (auto & s : layers) {
        for (int p = 0; s && p < MOE_N_PARTS; p++) {
            if (ggml_tensor * t = s->tensors[p]) {
                const ggml_tensor * h = s->l->block.host[p];
                ggml_backend_tensor_alloc(buf.get(), t, part_data[p]);
                s->tail[p] = ggml_backend_buft_get_alloc_size(buft, t) - ggml_nbytes(t);
                ggml_moe_prompt_node n = {};
                n.part      = p;
                n.lane      = this;
                n.row       = s->l->block.row;
                n.device    = device;
                n.ids       = (int32_t *) ggml_backend_buffer_get_base(buf_ids.get());
                n.staging   = part_data[p];
                n.host      = h->data;
                n.size      = ggml_nbytes(h);
                n.wants_ids = wants_ids;
                n.work      = work;
                n.kind = GGML_MOE_PROMPT_STAGE;
                s->stage[p] = n;
                n.kind = GGML_MOE_PROMPT_RELEASE;
                s->release[p] = n;
            }
        }
    }
    return true;
}

size_t moe_prompt::device_bytes() const {
    return ggml_backend_buffer_get_size(buf.get());
}

//
// decodes
//

void moe_prompt::begin_ubatch() {
    settle();
    ubatch++;
    first = true;
    for (auto & s : layers) {
        if (s) {
            s->known = false;
        }
    }
}

// After an ubatch that was broken off copies may be left for which nobody has waited.
void moe_prompt::settle() {
    bool under_way = false;
    for (staging & p : parts) {
        under_way   = under_way || p.under_way;
        p.under_way = false;
        p.holds     = nullptr;
    }
    if (under_way && api) {
        api->wait(device);
    }
}

//
// what is copied
//

moe_prompt::staged_layer & moe_prompt::layer_of(const ggml_moe_prompt_node & node) const {
    return *layers[node.row];
}

moe_prompt::staged_layer * moe_prompt::after(const staged_layer & s) const {
    bool found = false;
    for (const auto & l : st.layers) { // in the model's order
        staged_layer * next = layers[l->block.row].get();
        if (found && next && next->built == ubatch) {
            return next;
        }
        found = found || l.get() == s.l;
    }
    return nullptr;
}

// Makes one copy of two that continue each other over the link. Within the device all of a part are of a size.
void moe_prompt::add(void * to, const void * from, size_t n, int part, bool local) {
    if (!copies.empty() && !local) {
        ggml_moe_prompt_copy & last = copies.back();
        if (last.part == part && !last.local && (char *) last.to + last.n == to && (const char *) last.from + last.n == from) {
            last.n += n;
            return;
        }
    }
    copies.push_back({ to, from, n, part, local });
}

template<typename used_t>
void moe_prompt::bring(const staged_layer & s, int part, const used_t & used) {
    const moe_block & b    = s.l->block;
    staging &         mem  = parts[part];
    const size_t    stride = b.expert_stride(part);
    const auto &   slot_of = s.l->slots.slot_of;
    if (mem.holds != &s) {
        std::fill(mem.there.begin(), mem.there.end(), 0);
        mem.holds = &s;
    }
    for (int e = 0; e < b.n_expert; e++) {
        if (!used[e] || mem.there[e]) {
            continue;
        }
        const bool local = slot_of[e] >= 0;
        char * to = part_data[part] + e*stride;
        add(to, local ? (const char *) s.l->slots.tensors[part]->data + slot_of[e]*stride : b.expert_data(part, e), stride, part, local);
        (local ? bytes.from_slots : bytes.over_link) += stride;
        mem.there[e]  = 1;
        mem.under_way = true;

        // the device reads so far past the expert's last row: no NaN may lie there
        const size_t tail = std::min(s.tail[part], stride);
        if (tail > 0 && e + 1 == b.n_expert) {
            add(to + stride, nullptr, tail, part, true);
        } else if (tail > 0 && !used[e + 1] && !mem.there[e + 1]) {
            add(to + stride, b.expert_data(part, e + 1), tail, part, local);
        }
    }
}

// What is resident costs next to nothing. Of the rest the half that most tokens chose: these are the surest, and while they cross
// the link the choice becomes known.
void moe_prompt::choose_likely(staged_layer & s) {
    const auto & slot_of = s.l->slots.slot_of;
    std::vector<int32_t> cold;
    for (int e = 0; e < s.l->block.n_expert; e++) {
        s.likely[e] = s.count[e] > 0 && slot_of[e] >= 0;
        if (s.count[e] > 0 && slot_of[e] < 0) {
            cold.push_back(e);
        }
    }
    std::stable_sort(cold.begin(), cold.end(), [&](int32_t a, int32_t b) { return s.count[a] > s.count[b]; });
    for (size_t i = 0; i < (cold.size() + 1)/2; i++) {
        s.likely[cold[i]] = 1;
    }
    s.n_before = s.n_tokens;
}

// Popularity says little about few tokens: of a cropped layer, or after a much longer ubatch.
bool moe_prompt::staged_layer::foresees() const {
    return n_before > 0 && n_tokens*2 >= n_before && n_tokens*l->block.n_used >= l->block.n_expert;
}

void moe_prompt::count_in_vain(const staged_layer & s) {
    const moe_block & b = s.l->block;
    for (int p : ORDER) {
        for (int e = 0; e < b.n_expert && parts[p].holds == &s; e++) {
            bytes.in_vain += parts[p].there[e] && s.count[e] == 0 && s.l->slots.slot_of[e] < 0 ? b.expert_stride(p) : 0;
        }
    }
}

bool moe_prompt::wants_ids(const ggml_moe_prompt_node * node) {
    return !((const moe_prompt *) node->lane)->layer_of(*node).known;
}

void moe_prompt::work(const ggml_moe_prompt_node * node, const int32_t * ids, int64_t n_ids, ggml_moe_prompt_work * work) {
    moe_prompt & lane = *(moe_prompt *) node->lane;
    staged_layer & s  = lane.layer_of(*node);
    lane.copies.clear();
    if (ids) {
        std::fill(s.count.begin(), s.count.end(), 0);
        for (int64_t i = 0; i < n_ids; i++) {
            if (ids[i] >= 0 && ids[i] < s.l->block.n_expert) {
                s.count[ids[i]]++;
            }
        }
        s.known = true;
        lane.count_in_vain(s);
        lane.choose_likely(s);
        for (int p : ORDER) { // what lies behind these in the link's queue waits for this layer's products
            if (s.tensors[p]) {
                lane.bring(s, p, s.count);
            }
        }
    }
    if (node->kind == GGML_MOE_PROMPT_STAGE) {
        lane.parts[node->part].under_way = false;
    } else {
        const staged_layer * next = lane.after(s);
        if (next && next->tensors[node->part] && next->foresees()) {
            const int64_t before = lane.bytes.over_link;
            lane.bring(*next, node->part, next->likely);
            lane.bytes.ahead += lane.bytes.over_link - before;
        }
    }
    *work = { lane.copies.data(), (int32_t) lane.copies.size(), lane.first };
    lane.first = false;
}

//
// the two operations on the CPU
//

void moe_prompt::emulate(ggml_tensor * dst, int ith, int n_threads, void * user_data) {
    GGML_UNUSED(n_threads);
    if (ith > 0) {
        return;
    }
    const ggml_moe_prompt_node & node = *(const ggml_moe_prompt_node *) user_data;
    const moe_prompt & lane = *(const moe_prompt *) node.lane;
    ggml_moe_prompt_work w = {};
    if (node.kind == GGML_MOE_PROMPT_STAGE) {
        const ggml_tensor * ids = dst->src[1];
        const size_t n_used = ids->ne[0];
        const bool   asked  = node.wants_ids(&node);
        for (int64_t t = 0; asked && t < ids->ne[1]; t++) {
            memcpy(node.ids + t*n_used, (const char *) ids->data + t*ids->nb[1], n_used*sizeof(int32_t));
        }
        node.work(&node, asked ? node.ids : nullptr, ids->ne[0]*ids->ne[1], &w);
    } else {
        node.work(&node, nullptr, 0, &w);
        memset(node.staging, 0xff, lane.part_size[node.part]); // NaN, or a number that is far off: nobody may read what was not brought anew
    }
    for (int i = 0; i < w.n_copies; i++) {
        const ggml_moe_prompt_copy & c = w.copies[i];
        const char * begin = lane.part_data[c.part];
        GGML_ASSERT(c.to >= begin && (char *) c.to + c.n <= begin + lane.part_size[c.part]); // events are of a part
        if (c.from) {
            memcpy(c.to, c.from, c.n);
        } else {
            memset(c.to, 0, c.n);
        }
    }
}

//
// graph
//

ggml_tensor * moe_prompt::node(const llm_graph_context & g, ggml_tensor * a, ggml_tensor * b, ggml_moe_prompt_node & node) const {
    ggml_tensor * t = ggml_custom_inplace(g.ctx0, a, &b, 1, emulate, 1, &node);
    moe_stream_mark(t, st.epoch);
    ggml_format_name(t, "moe_%s-%d.%d", node.kind == GGML_MOE_PROMPT_STAGE ? "stage" : "release", node.row, node.part);
    ggml_backend_sched_set_tensor_backend(g.sched, t, st.backend_of(dev));
    ggml_build_forward_expand(g.gf, t);
    return t;
}

// The operations of build_moe_ffn, in an order of our own: a product stands between the stage and the release of its weights.
ggml_tensor * moe_prompt::build(const llm_graph_context & g, moe_layer & l, const llama_moe_ffn & f) {
    ggml_context *    ctx0 = g.ctx0;
    const moe_block & b    = l.block;
    staged_layer &    s    = *layers[b.row];
    const int64_t n_tokens = f.cur->ne[1];
    s.n_tokens = (int) n_tokens;
    s.built    = ubatch;

    auto with = [&](int part, auto operation) { // the product of a part, or the sum with a bias
        ggml_tensor * staged = node(g, s.tensors[part], f.ids, s.stage[part]);
        ggml_tensor * y      = operation(staged);
        ggml_backend_sched_set_tensor_backend(g.sched, y, st.backend_of(dev));
        ggml_build_forward_expand(g.gf, y);
        node(g, staged, y, s.release[part]);
        return y;
    };
    auto product = [&](int part, int bias, ggml_tensor * x) {
        ggml_build_forward_expand(g.gf, x); // nothing but the product waits for its weights
        ggml_tensor * y = with(part, [&](ggml_tensor * w) { return ggml_mul_mat_id(ctx0, w, x, f.ids); });
        return s.tensors[bias] ? with(bias, [&](ggml_tensor * w) { return ggml_add_id(ctx0, y, w, f.ids); }) : y;
    };

    ggml_tensor * cur = ggml_reshape_3d(ctx0, f.cur, b.n_embd, 1, n_tokens);
    if (b.weight_before) {
        cur = ggml_mul(ctx0, ggml_repeat_4d(ctx0, cur, b.n_embd, b.n_used, n_tokens, 1), f.weights);
    }
    ggml_tensor * gate = product(MOE_GATE, MOE_GATE_B, cur);
    ggml_tensor * up;
    if (b.merged) {
        ggml_tensor * gu = gate;
        gate = ggml_view_3d(ctx0, gu, b.n_ff, gu->ne[1], gu->ne[2], gu->nb[1], gu->nb[2], 0);
        up   = ggml_view_3d(ctx0, gu, b.n_ff, gu->ne[1], gu->ne[2], gu->nb[1], gu->nb[2], b.n_ff*gu->nb[0]);
    } else {
        up = product(MOE_UP, MOE_UP_B, cur);
    }
    ggml_tensor * y = product(MOE_DOWN, MOE_DOWN_B, moe_activation_op(ctx0, b.act, gate, up));
    if (b.down_scale) {
        ggml_tensor * scale = ggml_reshape_3d(ctx0, st.stream->scale_of(ctx0, b), 1, b.n_expert, 1);
        y = ggml_mul(ctx0, y, ggml_get_rows(ctx0, ggml_repeat_4d(ctx0, scale, 1, b.n_expert, n_tokens, 1), f.ids));
    }
    if (!b.weight_before) {
        y = ggml_mul(ctx0, y, f.weights);
    }
    ggml_build_forward_expand(g.gf, y);

    // CUDA fuses just this sequence
    std::vector<ggml_tensor *> of_k(b.n_used);
    for (int k = 0; k < b.n_used; k++) {
        of_k[k] = ggml_view_2d(ctx0, y, b.n_embd, n_tokens, y->nb[2], k*y->nb[1]);
        ggml_build_forward_expand(g.gf, of_k[k]);
    }
    ggml_tensor * out = of_k[0];
    for (int k = 1; k < b.n_used; k++) {
        out = ggml_add(ctx0, out, of_k[k]);
        ggml_build_forward_expand(g.gf, out);
    }
    return b.n_used == 1 ? ggml_cont(ctx0, out) : out;
}
