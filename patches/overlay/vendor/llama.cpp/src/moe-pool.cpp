#include "moe-pool.h"

#include <algorithm>
#include <chrono>
#include <fstream>
#include <stdexcept>
#include <string>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#include <unistd.h>
#endif

//
// cores
//

#if defined(__linux__)

// cores of the cgroup's CPU quota, rounded up; 0: no quota
static int quota_cores() {
    std::ifstream v2("/sys/fs/cgroup/cpu.max");
    std::string quota;
    double period = 0;
    if (v2 >> quota >> period) {
        return quota == "max" || period <= 0 ? 0 : (int) std::max(1.0, std::stod(quota)/period + 0.5);
    }
    std::ifstream q("/sys/fs/cgroup/cpu/cpu.cfs_quota_us");
    std::ifstream p("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
    double us = 0;
    return q >> us && p >> period && us > 0 && period > 0 ? (int) std::max(1.0, us/period + 0.5) : 0;
}

// "0-7,16" as a set; empty if the file is not there
static std::vector<int> cpu_list(const char * path) {
    std::vector<int> cpus;
    std::ifstream file(path);
    std::string part;
    while (std::getline(file, part, ',')) {
        int first = 0;
        int last  = 0;
        const int n = sscanf(part.c_str(), "%d-%d", &first, &last);
        for (int c = first; n > 0 && c <= (n == 2 ? last : first); c++) {
            cpus.push_back(c);
        }
    }
    return cpus;
}

// the CPUs that this process may use; of a hybrid CPU the performance cores, if it may use any
static cpu_set_t usable_cpus() {
    cpu_set_t mask;
    CPU_ZERO(&mask);
    if (sched_getaffinity(0, sizeof(mask), &mask) != 0) {
        for (long c = 0; c < sysconf(_SC_NPROCESSORS_ONLN) && c < CPU_SETSIZE; c++) {
            CPU_SET(c, &mask);
        }
    }
    cpu_set_t fast;
    CPU_ZERO(&fast);
    for (int c : cpu_list("/sys/devices/cpu_core/cpus")) { // exists on hybrid CPUs only
        if (c < CPU_SETSIZE && CPU_ISSET(c, &mask)) {
            CPU_SET(c, &fast);
        }
    }
    return CPU_COUNT(&fast) > 0 ? fast : mask;
}

int moe_pool::usable_cores() {
    const cpu_set_t cpus = usable_cpus();
    const int quota = quota_cores();
    return quota > 0 ? std::min(quota, CPU_COUNT(&cpus)) : CPU_COUNT(&cpus);
}

static void name_and_place() {
    pthread_setname_np(pthread_self(), "moe-pool");
    const cpu_set_t cpus = usable_cpus();
    pthread_setaffinity_np(pthread_self(), sizeof(cpus), &cpus);
}

#else

int moe_pool::usable_cores() {
    return std::max(1, (int) std::thread::hardware_concurrency());
}

static void name_and_place() {}

#endif

int moe_pool::threads_for(int wanted, int n_cores) {
    const int reserved = n_cores > 8 ? 2 : 1;
    return std::max(1, std::min(wanted, n_cores - reserved));
}

//
// clients
//

std::shared_ptr<moe_pool> moe_pool::of_process() {
    static std::mutex mutex;
    static std::weak_ptr<moe_pool> pool;
    std::lock_guard<std::mutex> lock(mutex);
    auto p = pool.lock();
    if (!p) {
        p    = std::make_shared<moe_pool>();
        pool = p;
    }
    return p;
}

moe_pool::moe_pool() = default;

moe_pool::~moe_pool() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        stop = true;
    }
    wake.notify_all();
    for (auto & t : threads) {
        t.join(); // a thread that hangs holds the pool here: it works on memory that is ours
    }
}

void moe_pool::add(const std::shared_ptr<moe_pool_client> & client) {
    std::lock_guard<std::mutex> lock(mutex);
    for (auto & slot : slots) {
        moe_pool_client * none = nullptr;
        if (slot.compare_exchange_strong(none, client.get())) {
            clients.push_back(client);
            return;
        }
    }
    throw std::runtime_error("more than " + std::to_string(MAX_CLIENTS) + " contexts with in-stream execution in one process");
}

bool moe_pool::remove(const std::shared_ptr<moe_pool_client> & client) {
    leave(*client);
    for (auto & slot : slots) {
        moe_pool_client * c = client.get();
        slot.compare_exchange_strong(c, nullptr);
    }
    // thread 0 may be looking at it, or threads be computing for it
    const int64_t t0 = moe_now_us();
    bool gone = true;
    while (in_use.load() == client.get()) {
        std::this_thread::yield();
        if (moe_now_us() - t0 > 1000000) {
            gone = false;
            break;
        }
    }
    std::lock_guard<std::mutex> lock(mutex);
    clients.erase(std::remove(clients.begin(), clients.end(), client), clients.end());
    if (!gone) {
        kept = client;
    }
    return gone;
}

bool moe_pool::healthy(const moe_pool_client & client) const {
    // who has just been answered may still see the last thread leave
    const int64_t t0 = moe_now_us();
    while (in_use.load() == &client && busy.load()) {
        std::this_thread::yield();
        if (moe_now_us() - t0 > 2000) {
            return false;
        }
    }
    return !broken.load() && !(busy.load() && t0 > deadline_us.load());
}

void moe_pool::enter(moe_pool_client & client) {
    if (client.active.exchange(true)) {
        return;
    }
    n_active++;
    if (n_parked.load() > 0) {
        { std::lock_guard<std::mutex> lock(mutex); } // nobody is between looking and sleeping now
        wake.notify_all();
    }
}

void moe_pool::leave(moe_pool_client & client) {
    if (client.active.exchange(false)) {
        n_active--;
    }
}

void moe_pool::grow(int n) {
    std::lock_guard<std::mutex> lock(mutex);
    const uint64_t seen = job_word.load(); // before the new ones count: they take part in all later requests
    for (int ith = (int) threads.size(); ith < std::min(n, MAX_THREADS); ith++) {
        threads.emplace_back([this, ith, seen] { work(ith, seen); });
    }
    n_threads = (int) threads.size();
}

void moe_pool::inject_fault(int ith, int sleep_ms) {
    fault_ms     = sleep_ms;
    fault_thread = ith;
}

//
// threads
//

// how long a thread has looked in vain
struct moe_pool::worker_wait {
    int     spins = 0;
    int64_t since = 0;

    void reset() {
        spins = 0;
        since = 0;
    }
};

// spare: the last request had no use for this thread. false: the pool ends
bool moe_pool::park(worker_wait & w, bool spare) {
    constexpr int SPINS_PER_LOOK  = 64;      // a few µs
    constexpr int YIELD_AFTER_US  = 50;      // the launching thread may need this core
    constexpr int NAP_AFTER_US    = 20000;   // a decode is in flight, but nothing is asked for: a long attention, a first capture
    constexpr int PARK_AFTER_US   = 1000;    // no decode in flight: drafting and sampling may take less
    moe_cpu_relax();
    if (++w.spins % SPINS_PER_LOOK != 0) {
        return true;
    }
    const int64_t now = moe_now_us();
    if (w.since == 0) {
        w.since = now;
    }
    const int64_t waited = now - w.since;
    if (stop.load(std::memory_order_relaxed)) {
        return false;
    }
    if (n_active.load(std::memory_order_relaxed) == 0 && waited > PARK_AFTER_US) {
        std::unique_lock<std::mutex> lock(mutex);
        n_parked++;
        wake.wait(lock, [this] { return n_active.load() > 0 || stop.load(); });
        n_parked--;
        w.reset();
        return !stop.load();
    }
    if (waited > (spare ? YIELD_AFTER_US : NAP_AFTER_US)) {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    } else if (waited > YIELD_AFTER_US) {
        std::this_thread::yield();
    }
    return true;
}

void moe_pool::take_part(int ith, int n) {
    if (fault_thread.load(std::memory_order_relaxed) == ith) {
        fault_thread = -1;
        std::this_thread::sleep_for(std::chrono::milliseconds(fault_ms.load()));
    }
    moe_pool_client * client = job;
    client->run(ith, n, barrier);
    const bool given_up = barrier.given_up.load();
    if (given_up) {
        broken = true; // until the last has left
    }
    if (n_left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        client->finish(given_up);
        in_use.store(nullptr);
        broken = false;
        busy.store(false, std::memory_order_release);
    }
}

// thread 0: looks at the clients; true if there was something to do
bool moe_pool::lead() {
    for (auto & slot : slots) {
        moe_pool_client * client = slot.load(std::memory_order_acquire);
        if (!client || !client->active.load(std::memory_order_acquire)) {
            continue;
        }
        in_use.store(client);
        if (slot.load() != client || !client->poll()) { // it may have been removed meanwhile
            in_use.store(nullptr);
            continue;
        }
        const int n = std::max(1, std::min(client->n_threads.load(), n_threads.load()));
        deadline_us = moe_now_us() + client->timeout_us;
        barrier.reset(deadline_us);
        job = client;
        n_left.store(n, std::memory_order_relaxed);
        busy.store(true, std::memory_order_relaxed);
        job_word.store(((job_word.load(std::memory_order_relaxed) >> 16) + 1) << 16 | (uint64_t) n, std::memory_order_release);
        take_part(0, n);
        // The others leave within microseconds. A thread that hangs keeps everybody from the next request.
        for (int spin = 0; busy.load(std::memory_order_acquire) && !stop.load(std::memory_order_relaxed); spin++) {
            moe_cpu_relax();
            if (spin > 100000) {
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
            } else if (spin > 4000) {
                std::this_thread::yield();
            }
        }
        return true;
    }
    return false;
}

void moe_pool::work(int ith, uint64_t seen) {
    name_and_place();
    worker_wait w;
    bool spare = false;
    while (true) {
        bool worked = false;
        if (ith == 0) {
            worked = lead();
        } else if (const uint64_t word = job_word.load(std::memory_order_acquire); word != seen) {
            const int n = (int) (word & 0xffff);
            seen   = word;
            spare  = ith >= n;
            worked = !spare;
            if (worked && fault_thread.load(std::memory_order_relaxed) == ith && fault_ms.load() < 0) {
                fault_thread = -1;
                return; // a dead thread, for tests
            }
            if (worked) {
                take_part(ith, n);
            }
        }
        if (worked) {
            w.reset();
        } else if (!park(w, spare)) {
            return;
        }
    }
}
