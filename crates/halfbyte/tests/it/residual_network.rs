//! The example of a residual network, small: its errors are what rounding of weights and values lets expect.

#[path = "../../examples/residual_network/bytes.rs"]
mod bytes;
#[path = "../../examples/residual_network/calibration.rs"]
mod calibration;
#[path = "../../examples/residual_network/checked.rs"]
mod checked;
#[path = "../../examples/residual_network/comparison.rs"]
mod comparison;
#[path = "../../examples/residual_network/floats.rs"]
mod floats;
#[path = "../../examples/residual_network/gpu.rs"]
mod gpu;
#[path = "../../examples/residual_network/machine.rs"]
mod machine;
#[path = "../../examples/residual_network/network.rs"]
mod network;
#[path = "../../examples/residual_network/noise.rs"]
mod noise;
#[path = "../../examples/residual_network/random.rs"]
mod random;
#[path = "../../examples/residual_network/shapes.rs"]
mod shapes;

use crate::cuda::queues;
use comparison::{Settings, agreement, compare};
use halfbyte::cpu::Cpu;
use std::time::Duration;

#[test]
fn errors_are_those_that_rounding_lets_expect() {
    let (images, time) = (32, Duration::ZERO);
    let settings = Settings { channels: &[32, 64], size: 16, fitted: 64, calibrated: 64, images, batch: 12, time };
    let ways = compare(&Cpu::new(2).unwrap(), &settings, None).unwrap();
    let [f32, four_bits, bytes] = &ways[..] else { panic!("{} ways", ways.len()) };
    assert!(f32.errors.is_none() && f32.same == images && f32.right > images / 4, "{} shapes told", f32.right);
    // Half of the classes may hang on a hair; a network that computes something else agrees on one in eight.
    for (way, same) in [(four_bits, images / 2), (bytes, images * 9 / 10)] {
        let [error, expected, greatest] = way.errors.unwrap();
        // Noise adds up by powers if it is independent. It is not quite: the same weights meet every pixel.
        assert!(error < 2.0 * expected, "{}: {error}, expected {expected}", way.name);
        assert!(error > expected / 4.0, "{}: {error}, expected {expected}: the bound says nothing", way.name);
        assert!(expected < 0.3 * way.signal, "{}: {expected} of {}", way.name, way.signal);
        assert!(greatest >= error && greatest < 8.0 * expected, "{}: {greatest}, expected {expected}", way.name);
        assert!(way.same >= same, "{}: {} of {images} as f32", way.name, way.same);
        assert!(way.weight_bytes < f32.weight_bytes / 3 && way.seconds > 0.0);
    }
    assert!(four_bits.weight_bytes < bytes.weight_bytes);
}

#[test]
fn a_gpu_computes_the_bytes_of_the_cpu_and_halves_within_the_bound() {
    let cpu = Cpu::new(2).unwrap();
    let (images, time) = (10, Duration::ZERO);
    // 3 channels, 64, 128 and 1×1: patches, implicit products, products.
    let settings = Settings { channels: &[64, 128], size: 16, fitted: 32, calibrated: 32, images, batch: 5, time };
    for gpu in queues() {
        let found = agreement(&cpu, &settings, &gpu).unwrap();
        assert!(found.compared > 5 * 16 * 16 * 3 * 64, "{} compared", found.compared);
        assert_eq!(found.different, 0, "of {} codes and classes", found.compared);
        assert_eq!(found.not_nearest, 0, "sums and means that are not the nearest halves");
        assert!(found.worst > 0.001 && found.worst <= 1.0, "{} of both bounds", found.worst);
        let ways = compare(&cpu, &settings, Some(&gpu)).unwrap();
        let [.., of_halves, of_bytes] = &ways[..] else { panic!("{} ways", ways.len()) };
        assert_eq!(of_bytes.errors, ways[2].errors, "the errors of the same bits");
        let ([error, _, _], [on_cpu, _, greatest]) = (of_halves.errors.unwrap(), ways[1].errors.unwrap());
        assert!((error - on_cpu).abs() < 0.1 * greatest, "{error}, on the CPU {on_cpu}");
        assert!(of_bytes.seconds > 0.0 && of_bytes.weight_bytes > 0 && of_halves.weight_bytes > 0);
    }
}
