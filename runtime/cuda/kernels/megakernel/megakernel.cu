// Products of a few rows and attention over a cache, job after job, in one persistent launch. A decoder's token is bound by reading its
// weights. As separate launches, each job begins with an idle memory and waits for the previous job. Here the weights of the next jobs are
// already in flight.
//
// There is one block per multiprocessor. Four threads load all data of the block, for all jobs, through a ring in shared memory
// (mega_ring.cuh). 16 warps consume it, job by job. Rows pass from job to job as packets (mega_exchange.cuh).
//
// All blocks wait for one another, so the launch is cooperative.
//
// generated.cuh defines LEAST_BLOCKS (of any grid that the launch may have), RUN (jobs of the run, for tags), MOST_JOBS (of a launch),
// multiply(), KINDS (of products, up to 6), for kind n ROWS_n, COLUMNS_n, DEPTH_n, NORM_n, PAIRED_n, RESIDUAL_n, epilogue_n() and
// epilogue_beside_n(), ATTENTION (whether any job is attention), and the macros of the files below.
#include "ptx.cuh"
#include "mma.cuh"
#include "generated.cuh"
#include "mega_ring.cuh"
#include "mega_exchange.cuh"
#include "mega_product.cuh"
#if ATTENTION
#include "mega_attention.cuh"
#endif
#include "mega_kinds.cuh"

struct alignas(16) Job {
    int kind, padding[3];
    u8 job[JOB_BYTES];                             // a ProductJob or an AttentionJob
};
struct Params {
    u32* state;                                    // number of earlier launches, and of blocks that have ended
    int first, jobs;                               // index of the first job in the run, and number of jobs
    Job job[MOST_JOBS];
};

extern "C" __global__ void __launch_bounds__(THREADS + 32 * PRODUCERS, 1) megakernel(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 shared[];
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = __shfl_sync(0xffffffffu, threadIdx.x % 32, threadIdx.x % 32);
    if (threadIdx.x == 0) Ring(shared).init();
    __syncthreads();
    if (warp >= WARPS) {
        give_registers<24>();
        if (lane) return;
        Producer me(shared, warp - WARPS);
        bool waited = false;
        for (int i = 0; i < p.jobs; i++) {
            const Job& job = p.job[i];
            if (job.kind == ATTENTION_KIND && !waited) grid_dependency_wait(), waited = true;    // for the lengths
            produce(job.kind, job.job, me, p.first + i);
        }
        return;
    }
    take_registers<112>();
    grid_dependency_wait();
    Ring ring(shared);
    const u32 epoch = *reinterpret_cast<volatile u32*>(p.state);
    const Now now = {epoch * RUN + 1, p.first};
    for (int i = 0; i < p.jobs; i++) {
        const Job& job = p.job[i];
        consume(job.kind, job.job, ring, shared + RING_BYTES, warp, lane, now, p.first + i);
        sync_warps();                              // the next job overwrites the same shared memory
    }
    if (threadIdx.x == 0 && count_arrival(p.state + 1) == gridDim.x - 1) {
        p.state[1] = 0;
        *reinterpret_cast<volatile u32*>(p.state) = epoch + 1;
    }
}
