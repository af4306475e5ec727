// The pool of CPU threads behind the in-stream execution, under stress: clients that come and go, ask from several threads, hang.
//
//   test_moe_pool [SECONDS]     'ok' and 'FAILED' lines, exit code 1 if anything failed
//
// Build, best with -fsanitize=thread (SRC = .../vendor/llama.cpp/src):
//   g++ -O1 -g -std=c++17 -pthread -fsanitize=thread -I$SRC test_moe_pool.cpp $SRC/moe-pool.cpp $SRC/moe-barrier.cpp -o test_moe_pool

#include "moe-pool.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>

static int n_failed = 0;

static void check(bool ok, const std::string & what) {
    printf("%s %s\n", ok ? "ok" : "FAILED", what.c_str());
    n_failed += !ok;
}

// A request is a number; threads write their share of an array in two phases, the second of which reads what others wrote.
struct client : public moe_pool_client {
    static constexpr int N = 64;

    std::atomic<uint32_t> asked{0}, answered{0}, failed{0};
    uint32_t seen = 0;
    int      first[N] = {}, second[N] = {};
    int      hang_ms = 0; // of the last thread, once

    bool poll() override {
        const uint32_t a = asked.load(std::memory_order_acquire);
        if (a == seen) {
            return false;
        }
        seen = a;
        return true;
    }

    void run(int ith, int n_threads, moe_barrier & barrier) override {
        if (ith == n_threads - 1 && hang_ms > 0) {
            const int ms = hang_ms;
            hang_ms = 0;
            std::this_thread::sleep_for(std::chrono::milliseconds(ms));
        }
        for (int i = ith; i < N; i += n_threads) {
            first[i] = (int) seen + i;
        }
        if (!barrier.wait(n_threads)) {
            failed.store(seen, std::memory_order_release); // nobody need wait for the one that hangs
            return;
        }
        for (int i = ith; i < N; i += n_threads) {
            second[i] = first[N - 1 - i];
        }
    }

    void finish(bool given_up) override {
        if (!given_up) {
            answered.store(seen, std::memory_order_release);
        }
    }

    // one decode with some requests; false: a wrong or missing answer
    bool decode(moe_pool & pool, int n_requests) {
        pool.enter(*this);
        bool ok = true;
        for (int r = 0; r < n_requests && ok; r++) {
            const uint32_t want = asked.load(std::memory_order_relaxed) + 1;
            asked.store(want, std::memory_order_release);
            const int64_t t0 = moe_now_us();
            while (answered.load(std::memory_order_acquire) != want) {
                std::this_thread::yield();
                if (failed.load(std::memory_order_acquire) == want || moe_now_us() - t0 > 20000000) {
                    ok = false;
                    break;
                }
            }
            for (int i = 0; i < N && ok; i++) {
                ok = second[i] == (int) want + N - 1 - i;
            }
        }
        pool.leave(*this);
        return ok;
    }
};

static void several_clients(double seconds) {
    auto pool = moe_pool::of_process();
    std::atomic<bool> wrong{false};
    const int64_t end = moe_now_us() + (int64_t) (seconds*1e6);
    std::vector<std::thread> owners;
    std::atomic<int> n_decodes{0};
    for (int t = 0; t < 3; t++) {
        owners.emplace_back([&, t] {
            for (int life = 0; moe_now_us() < end; life++) {
                auto c = std::make_shared<client>();
                c->n_threads = 1 + (t + life) % 4;
                pool->add(c);
                pool->grow(c->n_threads);
                for (int d = 0; d < 20 && moe_now_us() < end; d++) {
                    wrong = wrong || !c->decode(*pool, 8);
                    n_decodes++;
                    if (d % 7 == 0) {
                        std::this_thread::sleep_for(std::chrono::milliseconds(3)); // threads park
                    }
                }
                wrong = wrong || !pool->remove(c);
            }
        });
    }
    for (auto & o : owners) {
        o.join();
    }
    check(!wrong && n_decodes > 3, "three threads with clients that come and go");
}

static void a_thread_that_hangs() {
    auto pool = moe_pool::of_process();
    auto c = std::make_shared<client>();
    c->n_threads  = 3;
    c->timeout_us = 50000;
    pool->add(c);
    pool->grow(3);
    check(c->decode(*pool, 4), "a client of three threads");
    c->hang_ms = 400;
    check(!c->decode(*pool, 1), "its request is given up");
    check(!pool->healthy(*c), "the pool serves nobody while the thread hangs");
    const int64_t t0 = moe_now_us();
    while (!pool->healthy(*c) && moe_now_us() - t0 < 10000000) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    check(pool->healthy(*c), "it is healthy again");
    check(c->decode(*pool, 4), "and serves the client");
    c->hang_ms = 300;
    check(!c->decode(*pool, 1), "given up again");
    c->timeout_us = 1000;
    const bool gone = pool->remove(c);
    check(gone, "removing waits for a thread that is only late");
}

int main(int argc, char ** argv) {
    several_clients(argc > 1 ? atof(argv[1]) : 2.0);
    a_thread_that_hangs();
    return n_failed ? 1 : 0;
}
