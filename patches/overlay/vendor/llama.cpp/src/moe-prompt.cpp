#include "moe-prompt.h"

#include "moe-state.h"

#include "llama-context.h"
#include "llama-graph.h"
#include "llama-impl.h"

#include "ggml.h"

#include <algorithm>
#include <cstring>

// Products in the order of their parts.
static constexpr int ORDER[] = { MOE_GATE, MOE_GATE_B, MOE_UP, MOE_UP_B, MOE_DOWN, MOE_DOWN_B };

static_assert(MOE_GATE_B == GGML_MOE_PROMPT_WEIGHTS && MOE_N_PARTS == GGML_MOE_PROMPT_BUFFERS, "a bias has the buffer of its part's number");

static bool is_bias(int part) {
    return part >= MOE_GATE_B;
}

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

static size_t weight_bytes(const moe_block & b) {
    size_t n = 0;
    for (int p : { MOE_GATE, MOE_UP, MOE_DOWN }) {
        n += b.host[p] ? ggml_nbytes(b.host[p]) : 0;
    }
    return n;
}

// More pieces leave more memory to slots, but the host needs 0.08 ms for each (measured on an H200's machine): as many as cross the
// link in a multiple of that.
static int choose_share(size_t layer_bytes) {
    constexpr size_t PIECE = (size_t) 64*1024*1024;
    return (int) std::clamp(layer_bytes/(GGML_MOE_PROMPT_WEIGHTS*PIECE), (size_t) 1, (size_t) MOE_MAX_PROMPT_SHARE);
}

// Kernels for unquantised weights need multiples of 32.
static int64_t rows_of_piece(const ggml_tensor * weight, size_t piece_bytes) {
    constexpr int64_t STEP = 32;
    const int64_t n_rows = weight->ne[1];
    if (ggml_nbytes(weight) <= piece_bytes) {
        return n_rows;
    }
    return std::min(n_rows, std::max(STEP, (int64_t) (piece_bytes*n_rows/ggml_nbytes(weight))/STEP*STEP));
}

void moe_prompt::cut(staged_layer & s, size_t piece_bytes) {
    const moe_block & b = s.l->block;
    int n_weights = 0;
    for (int part : ORDER) {
        const ggml_tensor * h = b.host[part];
        if (!h) {
            continue;
        }
        const int64_t n_rows = is_bias(part) ? 1 : h->ne[1];
        const int64_t step   = is_bias(part) ? 1 : rows_of_piece(h, piece_bytes);
        for (int64_t row = 0; row < n_rows; row += step) {
            piece p;
            p.part   = part;
            p.buffer = is_bias(part) ? part : n_weights++ % GGML_MOE_PROMPT_WEIGHTS;
            p.offset = is_bias(part) ? 0 : row*h->nb[1];
            p.tensor = is_bias(part) ? ggml_new_tensor_2d(ctx.get(), h->type, h->ne[0], b.n_expert)
                                     : ggml_new_tensor_3d(ctx.get(), h->type, h->ne[0], std::min(step, n_rows - row), b.n_expert);
            p.stride = is_bias(part) ? p.tensor->nb[1] : p.tensor->nb[2];
            ggml_format_name(p.tensor, "moe_staging-%d.%d", b.row, (int) s.pieces.size());
            const size_t size = ggml_backend_buft_get_alloc_size(ggml_backend_dev_buffer_type(dev), p.tensor);
            p.tail = size - ggml_nbytes(p.tensor);
            staging & mem = buffers[p.buffer];
            mem.size = std::max(mem.size, GGML_PAD(size, (size_t) 256));
            s.pieces.push_back(p);
        }
    }
}

bool moe_prompt::init(int n_ubatch, int share, std::string & error) {
    layers.resize(st.rows.size());
    int    n_used  = 0;
    size_t largest = 0;
    for (const moe_layer * l : st.rows) {
        if (l && l->prompt_reason.empty()) {
            largest = std::max(largest, weight_bytes(l->block));
            n_used  = std::max(n_used, l->block.n_used);
        }
    }
    if (share == 0) {
        share = choose_share(largest);
    }
    const size_t piece_bytes = largest/(GGML_MOE_PROMPT_WEIGHTS*share) + 1;
    size_t n_tensors = 0;
    for (const moe_layer * l : st.rows) {
        for (int part = 0; l && part < MOE_N_PARTS; part++) {
            n_tensors += l->block.host[part] ? l->block.host[part]->ne[1]/rows_of_piece(l->block.host[part], piece_bytes) + 1 : 0;
        }
    }
    ctx.reset(ggml_init({ ggml_tensor_overhead()*n_tensors, nullptr, true }));
    for (moe_layer * l : st.rows) {
        if (l && l->prompt_reason.empty()) {
            auto s = std::make_unique<staged_layer>();
            s->l = l;
            s->count.resize(l->block.n_expert);
            s->likely.resize(l->block.n_expert);
            cut(*s, piece_bytes);
            layers[l->block.row] = std::move(s);
        }
    }

    size_t size = 0;
    for (const staging & mem : buffers) {
        size += mem.size;
    }
    buf.reset(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(dev), size));
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
    for (staging & mem : buffers) {
        mem.data = data;
        mem.there.resize(st.log.n_expert);
        data += mem.size;
    }

    for (auto & s : layers) {
        for (size_t i = 0; s && i < s->pieces.size(); i++) {
            piece & p = s->pieces[i];
            const moe_block & b = s->l->block;
            ggml_backend_tensor_alloc(buf.get(), p.tensor, buffers[p.buffer].data);
            ggml_moe_prompt_node n = {};
            n.piece     = (int) i;
            n.buffer    = p.buffer;
            n.lane      = this;
            n.row       = b.row;
            n.device    = device;
            n.ids       = (int32_t *) ggml_backend_buffer_get_base(buf_ids.get());
            n.staging   = buffers[p.buffer].data;
            n.host      = b.expert_data(p.part, 0) + p.offset;
            n.size      = p.stride;
            n.pitch     = b.expert_stride(p.part);
            n.n_expert  = b.n_expert;
            n.wants_ids = wants_ids;
            n.work      = work;
            n.kind = GGML_MOE_PROMPT_STAGE;
            p.stage = n;
            n.kind = GGML_MOE_PROMPT_RELEASE;
            p.release = n;
        }
    }
    return true;
}

size_t moe_prompt::device_bytes() const {
    return ggml_backend_buffer_get_size(buf.get());
}

// of a piece: stage, product, release, and its place among the rows; of one of the last weight also all that makes a sum of the
// experts' outputs, a view and an addition for each
int moe_prompt::n_nodes() const {
    int n = 0;
    for (const auto & s : layers) {
        for (size_t i = 0; s && i < s->pieces.size(); i++) {
            n += 4 + (s->pieces[i].part == MOE_DOWN ? 8 + 2*s->l->block.n_used : 0);
        }
    }
    return n;
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
    for (staging & mem : buffers) {
        under_way     = under_way || mem.under_way;
        mem.under_way = false;
        mem.holds     = nullptr;
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

const moe_prompt::piece * moe_prompt::staged_layer::next_in(int buffer, size_t from) const {
    for (size_t i = from; i < pieces.size(); i++) {
        if (pieces[i].buffer == buffer) {
            return &pieces[i];
        }
    }
    return nullptr;
}

template<typename used_t>
void moe_prompt::bring(const staged_layer & s, const piece & p, const used_t & used) {
    const moe_block & b    = s.l->block;
    staging &         mem  = buffers[p.buffer];
    const size_t    pitch  = b.expert_stride(p.part);
    const auto &   slot_of = s.l->slots.slot_of;
    if (mem.holds != &p) {
        std::fill(mem.there.begin(), mem.there.end(), 0);
        mem.holds = &p;
    }
    for (int e = 0; e < b.n_expert; e++) {
        if (!used[e] || mem.there[e]) {
            continue;
        }
        const bool   local = slot_of[e] >= 0;
        const char * from  = local ? (const char *) s.l->slots.tensors[p.part]->data + slot_of[e]*pitch : b.expert_data(p.part, e);
        char * to = mem.data + e*p.stride;
        copies.push_back({ to, from + p.offset, p.stride, p.buffer, local });
        (local ? bytes.from_slots : bytes.over_link) += p.stride;
        mem.there[e]  = 1;
        mem.under_way = true;

        // the device reads so far past the expert's last row: no NaN may lie there
        const size_t tail = std::min(p.tail, p.stride);
        if (tail > 0 && e + 1 == b.n_expert) {
            copies.push_back({ to + p.stride, nullptr, tail, p.buffer, true });
        } else if (tail > 0 && !used[e + 1] && !mem.there[e + 1]) {
            copies.push_back({ to + p.stride, b.expert_data(p.part, e + 1) + p.offset, tail, p.buffer, local });
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
    for (const piece & p : s.pieces) {
        const staging & mem = buffers[p.buffer];
        for (int e = 0; e < s.l->block.n_expert && mem.holds == &p; e++) {
            bytes.in_vain += mem.there[e] && s.count[e] == 0 && s.l->slots.slot_of[e] < 0 ? p.stride : 0;
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
        for (const piece & p : s.pieces) { // what lies behind these in the link's queue waits for this layer's products
            if (&p == s.next_in(p.buffer, 0)) {
                lane.bring(s, p, s.count);
            }
        }
    }
    if (node->kind == GGML_MOE_PROMPT_STAGE) {
        lane.buffers[node->buffer].under_way = false;
    } else if (const piece * p = s.next_in(node->buffer, node->piece + 1)) {
        lane.bring(s, *p, s.count);
    } else {
        const staged_layer * next = lane.after(s);
        const piece * first = next && next->foresees() ? next->next_in(node->buffer, 0) : nullptr;
        if (first) {
            const int64_t before = lane.bytes.over_link;
            lane.bring(*next, *first, next->likely);
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
        memset(lane.buffers[node.buffer].data, 0xff, lane.buffers[node.buffer].size); // NaN, or a number that is far off: nobody may read what was not brought anew
    }
    for (int i = 0; i < w.n_copies; i++) {
        const ggml_moe_prompt_copy & c = w.copies[i];
        const staging & mem = lane.buffers[c.buffer];
        GGML_ASSERT(c.to >= mem.data && (char *) c.to + c.n <= mem.data + mem.size); // events are of a buffer
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
    ggml_format_name(t, "moe_%s-%d.%d", node.kind == GGML_MOE_PROMPT_STAGE ? "stage" : "release", node.row, node.piece);
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

    auto with = [&](piece & p, auto operation) { // a product with a piece, or the sum with a bias
        ggml_tensor * staged = node(g, p.tensor, f.ids, p.stage);
        ggml_tensor * y      = operation(staged);
        ggml_backend_sched_set_tensor_backend(g.sched, y, st.backend_of(dev));
        ggml_build_forward_expand(g.gf, y);
        node(g, staged, y, p.release);
        return y;
    };
    // `finish` is applied to the rows of a piece, or to all if they need a bias first
    auto product = [&](int part, int bias, ggml_tensor * x, auto finish) {
        ggml_build_forward_expand(g.gf, x); // nothing but the product waits for its weights
        const bool    apart = !b.host[bias];
        ggml_tensor * y     = nullptr;
        for (piece & p : s.pieces) {
            if (p.part == part) {
                ggml_tensor * rows = with(p, [&](ggml_tensor * w) { return ggml_mul_mat_id(ctx0, w, x, f.ids); });
                rows = apart ? finish(rows) : rows;
                y = y ? ggml_concat(ctx0, y, rows, 0) : rows;
                ggml_build_forward_expand(g.gf, y);
            } else if (p.part == bias) {
                y = with(p, [&](ggml_tensor * w) { return ggml_add_id(ctx0, y, w, f.ids); });
            }
        }
        return apart ? y : finish(y);
    };
    auto same = [](ggml_tensor * y) { return y; };
    auto sum  = [&](ggml_tensor * y) { // of the experts' outputs
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
            of_k[k] = ggml_view_2d(ctx0, y, y->ne[0], n_tokens, y->nb[2], k*y->nb[1]);
            ggml_build_forward_expand(g.gf, of_k[k]);
        }
        ggml_tensor * out = of_k[0];
        for (int k = 1; k < b.n_used; k++) {
            out = ggml_add(ctx0, out, of_k[k]);
            ggml_build_forward_expand(g.gf, out);
        }
        return b.n_used == 1 ? ggml_cont(ctx0, out) : out;
    };

    ggml_tensor * cur = ggml_reshape_3d(ctx0, f.cur, b.n_embd, 1, n_tokens);
    if (b.weight_before) {
        cur = ggml_mul(ctx0, ggml_repeat_4d(ctx0, cur, b.n_embd, b.n_used, n_tokens, 1), f.weights);
    }
    ggml_tensor * gate = product(MOE_GATE, MOE_GATE_B, cur, same);
    ggml_tensor * up;
    if (b.merged) {
        ggml_tensor * gu = gate;
        gate = ggml_view_3d(ctx0, gu, b.n_ff, gu->ne[1], gu->ne[2], gu->nb[1], gu->nb[2], 0);
        up   = ggml_view_3d(ctx0, gu, b.n_ff, gu->ne[1], gu->ne[2], gu->nb[1], gu->nb[2], b.n_ff*gu->nb[0]);
    } else {
        up = product(MOE_UP, MOE_UP_B, cur, same);
    }
    return product(MOE_DOWN, MOE_DOWN_B, moe_activation_op(ctx0, b.act, gate, up), sum);
}
