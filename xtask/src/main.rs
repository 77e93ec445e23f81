//! Tasks of the repository: `cargo xtask --help`.
#![forbid(unsafe_code)]

mod bench_models;
mod bench_record;
mod bench_results;
mod c_header;
mod cubins;
mod dependencies;
mod gpu_bundle;
mod install_c;
mod kernels;
mod launches;
mod oracles;
mod paddle;
mod plots;
mod python;
mod sweeps;
mod wheel;

use clap::Parser;

/// Tasks of the repository.
#[derive(Parser)]
#[command(name = "cargo xtask")]
enum Task {
    /// Measure products and write a file in bench/record, in a folder named after the processor.
    BenchRecord(bench_record::Args),
    /// Make bench/RESULTS.md from the records in bench/record.
    BenchResults(bench_results::Args),
    /// Make the header of the C interface from its sources.
    CHeader(c_header::Args),
    /// Compile GPU kernels into a folder that serves machines without a compiler.
    Cubins(cubins::Args),
    /// Check licences, sources and versions of dependencies.
    Dependencies(dependencies::Args),
    /// Build tests and command line for a machine with a GPU, and put them in a folder with a script that runs them.
    GpuBundle(gpu_bundle::Args),
    /// Build the C interface and put libraries, headers and a file for pkg-config below a folder.
    InstallC(install_c::Args),
    /// Make docs/kernels.md: which kernel multiplies every format on every kind of device.
    Kernels(kernels::Args),
    /// Launch random work on a driver that runs nothing and refuses what devices of many kinds would refuse.
    Launches(launches::Args),
    /// Compare what the software of each format reads in the files that we write.
    Oracles(oracles::Args),
    /// Make docs/plots.md and its pictures from the records.
    Plots(plots::Args),
    /// Run our functions of Paddle's names beside Paddle, and Paddle's tests of them.
    Paddle(paddle::Args),
    /// Build the Python package, run its tests and check its types.
    Python(python::Args),
    /// Print results of `bench matmul --sweep --json` as lines of tests/it/cuda/sweeps, to which the model of the machine is fitted.
    Sweeps(sweeps::Args),
    /// Build the wheel of the Python package, check its size, and run it where nothing else is installed.
    Wheel(wheel::Args),
}

fn main() -> std::process::ExitCode {
    let result = match Task::parse() {
        Task::BenchRecord(args) => bench_record::run(&args),
        Task::BenchResults(args) => bench_results::run(&args),
        Task::CHeader(args) => c_header::run(&args),
        Task::Cubins(args) => cubins::run(&args),
        Task::Dependencies(args) => dependencies::run(&args),
        Task::GpuBundle(args) => gpu_bundle::run(&args),
        Task::InstallC(args) => install_c::run(&args),
        Task::Kernels(args) => kernels::run(&args),
        Task::Launches(args) => launches::run(&args),
        Task::Oracles(args) => oracles::run(&args),
        Task::Plots(args) => plots::run(&args),
        Task::Paddle(args) => paddle::run(&args),
        Task::Python(args) => python::run(&args),
        Task::Sweeps(args) => sweeps::run(&args),
        Task::Wheel(args) => wheel::run(&args),
    };
    match result {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("error: {message}");
            std::process::ExitCode::FAILURE
        }
    }
}
