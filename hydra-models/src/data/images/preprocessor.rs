//! Image preprocessing, as by Transformers' `ViTImageProcessor` and `ConvNextImageProcessor`.

use super::decode::Rgb;
use super::resample::{Filter, resize};
use crate::ModelError;
use crate::weights::{in_file, read_json};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::path::Path;

/// The file in a model's directory that configures it.
pub const PREPROCESSOR: &str = "preprocessor_config.json";

/// Resizes and normalizes images.
#[derive(Clone, Debug, PartialEq)]
pub struct Preprocessor {
    /// The side of the result in pixels.
    side: usize,
    /// The length of an image's shorter side before the center crop; `None` if images are resized to a square.
    shorter: Option<usize>,
    /// The resampling filter, if images are resized.
    filter: Option<Filter>,
    /// The factor that bytes are multiplied by.
    scale: f64,
    mean: [f32; 3],
    deviation: [f32; 3],
}

/// The file's fields, with the defaults of Transformers.
#[derive(Deserialize)]
#[serde(default)]
struct Json {
    do_resize: bool,
    size: Value,
    resample: Option<u64>,
    do_rescale: bool,
    rescale_factor: f64,
    do_normalize: bool,
    image_mean: Option<Vec<f64>>,
    image_std: Option<Vec<f64>>,
    do_center_crop: Option<bool>,
    do_pad: Option<bool>,
    image_processor_type: String,
    feature_extractor_type: String,
    crop_pct: Option<f64>,
}

impl Default for Json {
    fn default() -> Self {
        Self {
            do_resize: true,
            size: json!({ "height": 224, "width": 224 }),
            resample: None,
            do_rescale: true,
            rescale_factor: 1.0 / 255.0,
            do_normalize: true,
            image_mean: None,
            image_std: None,
            do_center_crop: None,
            do_pad: None,
            image_processor_type: String::new(),
            feature_extractor_type: String::new(),
            crop_pct: None,
        }
    }
}

impl Preprocessor {
    /// Transformers' default: bilinear resizing to the side, and values from -1 to 1.
    pub fn of_side(side: usize) -> Self {
        let scale = 1.0 / 255.0;
        let filter = Some(Filter::Bilinear);
        Self { side, shorter: None, filter, scale, mean: [0.5; 3], deviation: [0.5; 3] }
    }

    /// The preprocessor of a model directory, for a model with inputs of this side; the default if there is no file.
    ///
    /// # Errors
    /// A file that cannot be read, asks for unsupported steps, or does not match the model.
    pub fn of_model(directory: Option<&Path>, side: usize) -> Result<Self, ModelError> {
        match directory.map(|directory| directory.join(PREPROCESSOR)).filter(|file| file.is_file()) {
            Some(file) => {
                let json = read_json(&file)?;
                Self::of_json(json, side).map_err(|source| in_file(&file, source))
            }
            None => Ok(Self::of_side(side)),
        }
    }

    /// The side of the result in pixels.
    pub fn side(&self) -> usize {
        self.side
    }

    /// The `preprocessor_config.json` of an equivalent Transformers processor.
    pub fn to_json(&self) -> String {
        let Self { side, shorter, filter, scale, mean, deviation } = self;
        let mut json = json!({
            "image_processor_type": "ViTImageProcessor", "do_resize": filter.is_some(),
            "size": { "height": side, "width": side }, "do_rescale": true, "rescale_factor": scale,
            "do_normalize": true, "image_mean": mean, "image_std": deviation,
        });
        filter.iter().for_each(|filter| json["resample"] = (*filter as u64).into());
        if let Some(shorter) = shorter {
            json["image_processor_type"] = "ConvNextImageProcessor".into();
            json["size"] = json!({ "shortest_edge": side });
            // Rounding down yields the same side again.
            json["crop_pct"] = (*side as f64 / (*shorter as f64 + 0.5)).into();
        }
        format!("{json:#}\n")
    }

    fn of_json(json: Json, side: usize) -> Result<Self, ModelError> {
        let (name, class) = match json.image_processor_type.is_empty() {
            true => ("feature_extractor_type", &json.feature_extractor_type),
            false => ("image_processor_type", &json.image_processor_type),
        };
        let is_any = |known: &[&str]| known.iter().any(|known| class.starts_with(*known));
        let has_all = json.resample.is_some() && json.image_mean.is_some() && json.image_std.is_some();
        let is_known = class.is_empty() || is_any(&["ViTImageProcessor", "ViTFeatureExtractor", "ConvNext"]);
        if !is_known && (!has_all || json.do_center_crop.is_none()) {
            return Err(refuse(name, class, EXPECTED_CLASS));
        }
        let shorter = match is_any(&["ConvNext"]) {
            true => shorter_side(&json, side)?,
            false => {
                check_size(&json.size, side)?;
                None
            }
        };
        for (name, found) in [("do_center_crop", json.do_center_crop), ("do_pad", json.do_pad)] {
            if found == Some(true) {
                return Err(refuse(name, "true", "false: Hydra only resizes and normalizes images"));
            }
        }
        let filter = json.do_resize.then(|| {
            let number = json.resample.unwrap_or(BILINEAR);
            let filter = Filter::numbered(number);
            filter.ok_or_else(|| refuse("resample", number, "the number of a Pillow filter, 0 to 5"))
        });
        let normal = |name, found: &Option<Vec<f64>>, unless: f32| match json.do_normalize {
            true => three(name, found.as_deref().unwrap_or(&[0.5; 3])),
            false => Ok([unless; 3]),
        };
        let (mean, deviation) =
            (normal("image_mean", &json.image_mean, 0.0)?, normal("image_std", &json.image_std, 1.0)?);
        if deviation.contains(&0.0) {
            return Err(refuse("image_std", "0", "three nonzero numbers"));
        }
        let scale = if json.do_rescale { json.rescale_factor } else { 1.0 };
        Ok(Self { side, shorter, filter: filter.transpose()?, scale, mean, deviation })
    }

    /// The resized bytes `[side, side, 3]` of an image. Returns the image's size as an error if it differs and images
    /// are not resized.
    pub(super) fn resized(&self, image: Rgb) -> Result<Vec<u8>, [usize; 2]> {
        let (side, size) = (self.side, [image.width, image.height]);
        match self.filter {
            Some(filter) if self.shorter.is_some() => Ok(self.cropped(&image, filter)),
            _ if size == [side; 2] => Ok(image.bytes),
            Some(filter) => Ok(resize(&image, side, side, filter).bytes),
            None => Err(size),
        }
    }

    /// Resizes the shorter side and crops the center.
    fn cropped(&self, image: &Rgb, filter: Filter) -> Vec<u8> {
        let shorter = self.shorter.unwrap_or(self.side);
        let along = |own: usize, other: usize| match own <= other {
            true => shorter,
            false => shorter * own / other,
        };
        let (width, height) = (along(image.width, image.height), along(image.height, image.width));
        let image = resize(image, width, height, filter);
        let (left, top) = ((width - self.side) / 2, (height - self.side) / 2);
        let row = |row: usize| &image.bytes[3 * ((top + row) * width + left)..][..3 * self.side];
        (0..self.side).flat_map(row).copied().collect()
    }

    /// The normalized value of each byte, per channel: scaled, minus the mean, divided by the deviation, each in `f32`.
    pub(super) fn numbers(&self) -> [[f32; 256]; 3] {
        let number = |byte: usize, colour: usize| {
            let scaled = (byte as f64 * self.scale) as f32;
            (scaled - self.mean[colour]) / self.deviation[colour]
        };
        std::array::from_fn(|colour| std::array::from_fn(|byte| number(byte, colour)))
    }
}

/// Pillow's number of the filter that images are resized with by default.
const BILINEAR: u64 = 2;

/// What a file of a class with other defaults needs.
const EXPECTED_CLASS: &str = "ViTImageProcessor or ConvNextImageProcessor: for another class, whose defaults differ, add \
                              `resample`, `image_mean`, `image_std` and `do_center_crop`";

/// From this side on, `ConvNextImageProcessor` does not crop.
const WARPED_FROM: usize = 384;

/// The length to which `ConvNextImageProcessor` resizes the shorter side before cropping, if it crops.
fn shorter_side(json: &Json, side: usize) -> Result<Option<usize>, ModelError> {
    let found = json.size.as_u64().or_else(|| json.size.get("shortest_edge")?.as_u64());
    if found != Some(side as u64) {
        let expected = format!("a shortest_edge of {side}, the `image_size` of the model's config.json");
        return Err(refuse("size", &json.size, expected));
    }
    let share = json.crop_pct.unwrap_or(224.0 / 256.0);
    if !(share > 0.0 && share <= 1.0) {
        return Err(refuse("crop_pct", share, "a number above 0, and at most 1"));
    }
    Ok((side < WARPED_FROM).then(|| (side as f64 / share) as usize))
}

/// The side of the images that the preprocessor of a model directory returns, for a model whose `config.json` does not name it;
/// `None` if there is no file or it has several sides.
///
/// # Errors
/// A file that cannot be read.
pub(crate) fn preprocessed_side(directory: Option<&Path>) -> Result<Option<usize>, ModelError> {
    let file = directory.map(|directory| directory.join(PREPROCESSOR));
    let Some(file) = file.filter(|file| file.is_file()) else { return Ok(None) };
    let Json { size, .. } = read_json(&file)?;
    let sides = match &size {
        Value::Object(sides) => match sides.get("shortest_edge").and_then(Value::as_u64) {
            Some(side) => Some([side; 2]),
            None => of_sides(sides),
        },
        other => other.as_u64().map(|side| [side; 2]),
    };
    Ok(sides.filter(|[height, width]| height == width).map(|[side, _]| side as usize))
}

/// Rejects a size other than the model's.
fn check_size(size: &Value, side: usize) -> Result<(), ModelError> {
    let number = |value: &Value| value.as_u64();
    let found = match size {
        Value::Object(size) => of_sides(size),
        other => number(other).map(|side| [side; 2]),
    };
    match found {
        Some(found) if found == [side as u64; 2] => Ok(()),
        _ => {
            let expected =
                format!("a height and a width of {side}, the `image_size` of the model's config.json");
            Err(refuse("size", size, expected))
        }
    }
}

fn of_sides(size: &Map<String, Value>) -> Option<[u64; 2]> {
    let of = |name: &str| size.get(name)?.as_u64();
    Some([of("height")?, of("width")?])
}

fn three(name: &'static str, found: &[f64]) -> Result<[f32; 3], ModelError> {
    match found {
        [red, green, blue] => Ok([red, green, blue].map(|number| *number as f32)),
        _ => Err(refuse(name, format!("{found:?}"), "one number each for red, green and blue")),
    }
}

fn refuse(name: &'static str, found: impl ToString, expected: impl Into<String>) -> ModelError {
    ModelError::Config { name, found: found.to_string(), expected: expected.into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::error::Error;
    use std::fs;

    /// The preprocessor of a directory with this file.
    fn of(text: &str, side: usize) -> Result<Preprocessor, ModelError> {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(PREPROCESSOR), text).unwrap();
        Preprocessor::of_model(Some(dir.path()), side)
    }

    #[test]
    fn the_default_is_that_of_transformers_and_is_written_as_it_is_read() {
        let default = Preprocessor::of_side(224);
        assert_eq!(of("{}", 224).unwrap(), default);
        assert_eq!(of(&default.to_json(), 224).unwrap(), default);
        assert_eq!(Preprocessor::of_model(None, 32).unwrap(), Preprocessor::of_side(32));
        let numbers = default.numbers();
        assert_eq!((numbers[0][0], numbers[2][255]), (-1.0, 1.0));
    }

    #[test]
    fn what_a_file_says_is_done() {
        let text = r#"{"size": 8, "resample": 3, "image_mean": [0.1, 0.2, 0.3], "image_std": [1, 2, 4],
            "rescale_factor": 0.5, "feature_extractor_type": "ViTFeatureExtractor"}"#;
        let read = of(text, 8).unwrap();
        assert_eq!(read.filter, Some(Filter::Bicubic));
        assert_eq!(read.numbers()[2][4], (2.0_f32 - 0.3) / 4.0);
        assert_eq!(of(&read.to_json(), 8).unwrap(), read);
        let plain =
            of(r#"{"size": 8, "do_resize": false, "do_rescale": false, "do_normalize": false}"#, 8).unwrap();
        assert_eq!(plain.numbers()[1][200], 200.0);
        let other = Rgb { width: 2, height: 1, bytes: vec![0; 6] };
        assert_eq!(plain.resized(other), Err([2, 1]));
    }

    #[test]
    fn a_file_of_another_class_is_read_if_it_leaves_nothing_to_the_defaults() {
        let fields = r#""size": 8, "resample": 3, "image_mean": [0.1, 0.2, 0.3], "image_std": [1, 2, 4]"#;
        let of_class = |class: &str| {
            of(&format!(r#"{{"image_processor_type": "{class}", "do_center_crop": false, {fields}}}"#), 8)
        };
        let read = of_class("ViTImageProcessorFast").unwrap();
        assert_eq!(of_class("DeiTImageProcessor").unwrap(), read);
        assert!(of(&format!(r#"{{"image_processor_type": "DeiTImageProcessor", {fields}}}"#), 8).is_err());
    }

    #[test]
    fn the_middle_is_cut_out_where_convnext_does() {
        let text = r#"{"size": {"shortest_edge": 8}, "crop_pct": 0.875, "resample": 3,
            "feature_extractor_type": "ConvNextFeatureExtractor"}"#;
        let read = of(text, 8).unwrap();
        assert_eq!(read.shorter, Some(9));
        assert_eq!(of(&read.to_json(), 8).unwrap(), read);
        // Twice as wide as high, and already of the target height: the crop keeps its pixels unchanged.
        let pixel = |x: usize, y: usize| [x as u8, y as u8, 7];
        let bytes = (0..9).flat_map(|y| (0..18).flat_map(move |x| pixel(x, y))).collect();
        let found = read.resized(Rgb { width: 18, height: 9, bytes }).unwrap();
        let expected: Vec<u8> = (0..8).flat_map(|y| (5..13).flat_map(move |x| pixel(x, y))).collect();
        assert_eq!(found, expected);
        let tall = Rgb { width: 5, height: 31, bytes: vec![3; 3 * 5 * 31] };
        assert_eq!(read.resized(tall).unwrap(), vec![3; 3 * 64]);
        let large = r#"{"size": 384, "image_processor_type": "ConvNextImageProcessor"}"#;
        assert_eq!(of(large, 384).unwrap().shorter, None, "a square, from this side on");
        for (text, expected) in [
            (
                r#"{"size": {"shortest_edge": 9}, "image_processor_type": "ConvNextImageProcessor"}"#,
                "a shortest_edge of 8",
            ),
            (
                r#"{"size": 8, "crop_pct": 0, "image_processor_type": "ConvNextImageProcessor"}"#,
                "`crop_pct` is 0",
            ),
        ] {
            let error = of(text, 8).unwrap_err();
            assert!(error.source().unwrap().to_string().contains(expected), "{error:?}");
        }
    }

    #[test]
    fn what_is_not_done_here_is_named() {
        for (text, expected) in [
            (r#"{"size": {"shortest_edge": 224}}"#, "`size` is {\"shortest_edge\":224}, expected a height"),
            (r#"{"size": 256}"#, "`size` is 256"),
            (r#"{"do_center_crop": true}"#, "`do_center_crop` is true"),
            (r#"{"resample": 9}"#, "`resample` is 9"),
            (r#"{"image_std": [1, 1]}"#, "`image_std` is [1.0, 1.0]"),
            (r#"{"image_std": [1, 0, 1]}"#, "`image_std` is 0"),
            (
                r#"{"image_processor_type": "BitImageProcessor"}"#,
                "`image_processor_type` is BitImageProcessor, expected ViTImageProcessor or ConvNextImageProcessor: for",
            ),
            (
                r#"{"feature_extractor_type": "CLIPFeatureExtractor", "resample": 3, "image_mean": [0, 0, 0]}"#,
                "add `resample`, `image_mean`, `image_std` and `do_center_crop`",
            ),
        ] {
            let error = of(text, 224).unwrap_err();
            let said = format!("{error}: {}", error.source().unwrap());
            assert!(said.contains(expected) && said.contains(PREPROCESSOR), "{said}");
        }
    }
}
