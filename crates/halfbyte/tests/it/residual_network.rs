//! The example of a residual network, small: its errors are what rounding of weights and values lets expect.

#[path = "../../examples/residual_network/bytes.rs"]
mod bytes;
#[path = "../../examples/residual_network/calibration.rs"]
mod calibration;
#[path = "../../examples/residual_network/comparison.rs"]
mod comparison;
#[path = "../../examples/residual_network/floats.rs"]
mod floats;
#[path = "../../examples/residual_network/network.rs"]
mod network;
#[path = "../../examples/residual_network/noise.rs"]
mod noise;
#[path = "../../examples/residual_network/random.rs"]
mod random;
#[path = "../../examples/residual_network/shapes.rs"]
mod shapes;

use comparison::{Settings, compare};
use halfbyte::cpu::Cpu;
use std::time::Duration;

#[test]
fn errors_are_those_that_rounding_lets_expect() {
    let (images, time) = (32, Duration::ZERO);
    let settings = Settings { channels: &[32, 64], size: 16, fitted: 64, calibrated: 64, images, batch: 12, time };
    let ways = compare(&Cpu::new(2).unwrap(), &settings).unwrap();
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
