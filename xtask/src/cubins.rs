//! `cargo xtask cubins`: kernels compiled here, for machines with a GPU and a driver but without NVRTC.

use halfbyte::Format;
use halfbyte::cuda::cache::Cache;
use halfbyte::cuda::compile::Compiler;
use halfbyte::cuda::conv;
use halfbyte::cuda::int8;
use halfbyte::cuda::matmul::{self, KERNELS};
use halfbyte::cuda::nn;
use halfbyte::cuda::nvrtc::Nvrtc;
use halfbyte::cuda::sources::{Arch, Instance};
use halfbyte::kernel::KvType;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

#[derive(clap::Args)]
pub struct Args {
    /// Processors that are compiled for.
    #[arg(long, value_delimiter = ',', default_value = "sm_80,sm_89,sm_90a")]
    arch: Vec<Arch>,
    /// Formats whose every configuration is compiled, where a kernel has more of them than are always made.
    #[arg(long, value_delimiter = ',', default_value = "w4a16-g128")]
    format: Vec<String>,
    /// Sizes of attention heads of models that are run with it.
    #[arg(long, value_delimiter = ',', default_values_t = [64, 128])]
    head_size: Vec<usize>,
    /// The folder, which HALFBYTE_CACHE names on the other machine.
    #[arg(short, long, default_value = "cubins")]
    output: PathBuf,
}

pub fn run(args: &Args) -> Result<(), String> {
    let nvrtc = Nvrtc::open().map_err(|e| e.to_string())?;
    let formats: Vec<Format> = args
        .format
        .iter()
        .map(|name| name.parse().map_err(|e| format!("{name}: {e}")))
        .collect::<Result<_, String>>()?;
    for &arch in &args.arch {
        // Machine code serves every driver of the compiler's major version.
        let compiler = Compiler::with_cache(arch, nvrtc.version(), Some(Cache::at(&args.output)));
        let served = KERNELS.iter().filter(|kernel| (kernel.serves)(arch));
        let mut instances: Vec<Instance> = served.flat_map(|kernel| (kernel.instances)(arch)).collect();
        instances.extend(formats.iter().flat_map(|&format| matmul::every_instance(arch, format)));
        instances.extend(matmul::auxiliary());
        for kernel in conv::KERNELS.iter().filter(|kernel| (kernel.serves)(arch)) {
            instances.extend((kernel.instances)());
            instances.extend(formats.iter().flat_map(|&format| (kernel.every_instance)(arch, format)));
        }
        let of_bytes = int8::KERNELS.iter().filter(|kernel| (kernel.serves)(arch));
        instances.extend(of_bytes.flat_map(|kernel| (kernel.instances)()));
        instances.extend(args.head_size.iter().flat_map(|&size| nn::instances(arch, Some(size), &KvType::ALL)));
        instances.extend(
            args.head_size.iter().flat_map(|&size| nn::instances_of_some_models(arch, Some(size), &KvType::ALL)),
        );
        instances.sort_by_cached_key(Instance::to_string);
        instances.dedup_by_key(|instance| instance.to_string());
        let (next, failure) = (AtomicUsize::new(0), Mutex::new(None));
        std::thread::scope(|scope| {
            for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
                scope.spawn(|| {
                    while let Some(instance) = instances.get(next.fetch_add(1, Ordering::Relaxed)) {
                        if let Err(why) = compiler.get(instance)
                            && let Ok(mut failure) = failure.lock()
                        {
                            *failure = Some(why.to_string());
                        }
                    }
                });
            }
        });
        let failure = failure.into_inner().map_err(|e| e.to_string())?;
        if let Some(why) = failure.or_else(|| compiler.refusal()) {
            return Err(format!("{arch}: {why}"));
        }
        println!("{arch}: {} kernels", instances.len());
    }
    println!("{}: HALFBYTE_CACHE={} on the other machine", args.output.display(), args.output.display());
    Ok(())
}
